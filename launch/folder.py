"""The folder of a run: what lies where in it, and whether a run may begin or go on there."""

import shutil
from pathlib import Path
from typing import Any

from sharding import ShardingError, checkpoint

CHECKPOINTS = "checkpoints"
CHECKPOINTS_BEFORE = "checkpoints-before"
CURVE = "loss.svg"

# What may differ between a run and its resumption without changing the curve.
FREE_SETTINGS = frozenset("mesh devices eval_every checkpoint_every sample out resume text.files text.cache".split())


def make(out: Path) -> None:
    """Make the folder, if it is not there, and see that it can be written to."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / ".writable").touch()
        (out / ".writable").unlink()
    except OSError as error:
        raise ShardingError(
            f"--out {out}", there=error.strerror or str(error), must="the folder must be one to write in"
        ) from None


def set_aside(out: Path) -> None:
    """Move the checkpoints of an earlier run out of the way of a new one; of such runs the last is kept."""
    if (out / CHECKPOINTS).exists():
        shutil.rmtree(out / CHECKPOINTS_BEFORE, ignore_errors=True)
        (out / CHECKPOINTS).rename(out / CHECKPOINTS_BEFORE)


def check_resumable(out: Path, settings: dict[str, Any]) -> None:
    """Raise an error if there is nothing to resume in `out`, or if it would not go on as the same run."""
    folder = out / CHECKPOINTS
    if checkpoint.latest_step(folder) is None:
        raise ShardingError(
            f"--resume --out {out}",
            there="no checkpoint in this folder",
            must="a run to resume has saved one",
            fix="leave --resume out",
        )
    before, now = _flat(checkpoint.extra(folder)), _flat(settings)
    names = [name for name in before | now if not {name, name.split(".")[0]} & FREE_SETTINGS]
    changed = [name for name in names if before.get(name) != now.get(name)]
    if changed:
        raise ShardingError(
            f"--resume --out {out}",
            there=[f"{name} was {before.get(name)}, is now {now.get(name)}" for name in changed],
            must="a run goes on with the model, data and optimization that it began with; mesh and devices may differ",
            fix="the options of the first run, or another --out",
        )


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one, with dotted names."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat
