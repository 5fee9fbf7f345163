"""The output folder of a run: its files, and whether a run can start or resume there."""

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
"""Key of a checkpoint's settings for the progress of the run."""

# Settings that may change on resume without changing the loss curve.
FREE_SETTINGS = frozenset(
    ["mesh", "devices", "eval_every", "checkpoint_every", "keep", "keep_best", "sample", "out", "init", "resume"]
    + ["resume_step", "nonfinite", "text.files", "text.cache", PROGRESS]
)

DISK_FULL_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}


def make(out: Path) -> None:
    """Create the folder if needed; raises an error if it is not writable."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / ".writable").touch()
        (out / ".writable").unlink()
    except OSError as error:
        raise ShardingError(f"--out {out}", found=error.strerror or str(error), required="a writable folder") from None


@contextlib.contextmanager
def disk_errors(out: Path) -> Iterator[None]:
    """Turns a full disk inside the context into an error that says how to continue."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL_ERRNOS:
            raise
        reason = error.strerror or str(error)
    else:
        return
    steps = checkpoint.steps(out / CHECKPOINTS)
    raise ShardingError(
        f"write to --out {out}",
        found=[reason, f"complete checkpoints: steps {', '.join(map(str, steps))}" if steps else "no checkpoint"],
        required="free disk space",
        fix="free disk space, then --resume" if steps else "free disk space",
    )


def move_aside(out: Path) -> None:
    """Move the checkpoints of an earlier run aside before a new one; only the last such run is kept."""
    if (out / CHECKPOINTS).exists():
        shutil.rmtree(out / CHECKPOINTS_BEFORE, ignore_errors=True)
        (out / CHECKPOINTS).rename(out / CHECKPOINTS_BEFORE)


def move_newer_aside(out: Path, step: int) -> None:
    """Move checkpoints newer than `step` aside: the run writes these steps again."""
    newer = [known for known in checkpoint.steps(out / CHECKPOINTS) if known > step]
    for known in newer:
        (out / CHECKPOINTS_BEFORE).mkdir(exist_ok=True)
        shutil.rmtree(out / CHECKPOINTS_BEFORE / str(known), ignore_errors=True)
        (out / CHECKPOINTS / str(known)).rename(out / CHECKPOINTS_BEFORE / str(known))


def check_resumable(out: Path, settings: dict[str, Any], step: int | None = None) -> None:
    """Raise an error unless `out` has a checkpoint, of `step` if given, from a run with the same settings."""
    folder = out / CHECKPOINTS
    if checkpoint.latest_step(folder) is None:
        raise ShardingError(
            f"--resume --out {out}",
            found="no checkpoint in this folder",
            required="a checkpoint to resume from",
            fix="leave --resume out",
        )
    before, now = _flat(_saved_settings(folder, step)), _flat(settings)
    names = [name for name in before | now if not {name, name.split(".")[0]} & FREE_SETTINGS]
    changed = [name for name in names if before.get(name) != now.get(name)]
    if changed:
        raise ShardingError(
            f"--resume --out {out}",
            found=[f"{name} was {before.get(name)}, is now {now.get(name)}" for name in changed],
            required="the model, data and optimization of the first run; mesh and devices may differ",
            fix="the options of the first run, or another --out",
        )


def _saved_settings(folder: Path, step: int | None) -> dict[str, Any]:
    """The settings saved with the checkpoint of `step`, by default the newest whose settings are readable."""
    if step is None:
        for known in reversed(checkpoint.steps(folder)):
            with contextlib.suppress(ShardingError):
                return checkpoint.extra(folder, known)
    return checkpoint.extra(folder, step)


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts flattened to dotted names."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat
