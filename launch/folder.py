"""The folder of a run: what lies where in it, and whether a run may begin or go on there."""

import contextlib
import errno
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sharding import ShardingError, checkpoint

CHECKPOINTS = "checkpoints"
CHECKPOINTS_BEFORE = "checkpoints-before"
CURVE = "loss.svg"

PROGRESS = "progress"
"""What a checkpoint keeps beside the settings: how far the run has come."""

# What may differ between a run and its resumption without changing the curve.
FREE_SETTINGS = frozenset(
    ["mesh", "devices", "eval_every", "checkpoint_every", "keep", "keep_best", "sample", "out", "init", "resume"]
    + ["resume_step", "nonfinite", "text.files", "text.cache", PROGRESS]
)

NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}


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


@contextlib.contextmanager
def writing(out: Path) -> Iterator[None]:
    """A disk that is full, met inside, is an error that says how to go on."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        reason = error.strerror or str(error)
    else:
        return
    steps = checkpoint.steps(out / CHECKPOINTS)
    raise ShardingError(
        f"write to --out {out}",
        there=[reason, f"checkpoints that are whole: steps {', '.join(map(str, steps))}" if steps else "no checkpoint"],
        must="the disk must have room",
        fix="make room, then --resume" if steps else "make room",
    )


def set_aside(out: Path) -> None:
    """Move the checkpoints of an earlier run out of the way of a new one; of such runs the last is kept."""
    if (out / CHECKPOINTS).exists():
        shutil.rmtree(out / CHECKPOINTS_BEFORE, ignore_errors=True)
        (out / CHECKPOINTS).rename(out / CHECKPOINTS_BEFORE)


def set_newer_aside(out: Path, step: int) -> None:
    """Move checkpoints newer than the one of `step` out of the way: the run writes these steps anew."""
    newer = [known for known in checkpoint.steps(out / CHECKPOINTS) if known > step]
    for known in newer:
        (out / CHECKPOINTS_BEFORE).mkdir(exist_ok=True)
        shutil.rmtree(out / CHECKPOINTS_BEFORE / str(known), ignore_errors=True)
        (out / CHECKPOINTS / str(known)).rename(out / CHECKPOINTS_BEFORE / str(known))


def check_resumable(out: Path, settings: dict[str, Any], step: int | None = None) -> None:
    """Raise an error if `out` has no checkpoint of `step`, or none at all, or if it would not go on as the same run."""
    folder = out / CHECKPOINTS
    if checkpoint.latest_step(folder) is None:
        raise ShardingError(
            f"--resume --out {out}",
            there="no checkpoint in this folder",
            must="a run to resume has saved one",
            fix="leave --resume out",
        )
    before, now = _flat(_kept(folder, step)), _flat(settings)
    names = [name for name in before | now if not {name, name.split(".")[0]} & FREE_SETTINGS]
    changed = [name for name in names if before.get(name) != now.get(name)]
    if changed:
        raise ShardingError(
            f"--resume --out {out}",
            there=[f"{name} was {before.get(name)}, is now {now.get(name)}" for name in changed],
            must="a run goes on with the model, data and optimization that it began with; mesh and devices may differ",
            fix="the options of the first run, or another --out",
        )


def _kept(folder: Path, step: int | None) -> dict[str, Any]:
    """The settings beside the checkpoint of `step`, by default the newest that has them whole."""
    if step is None:
        for known in reversed(checkpoint.steps(folder)):
            with contextlib.suppress(ShardingError):
                return checkpoint.extra(folder, known)
    return checkpoint.extra(folder, step)


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one, with dotted names."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat
