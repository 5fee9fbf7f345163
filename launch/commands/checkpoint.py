"""`sharding checkpoint`: inspect and verify checkpoints, export and import safetensors files."""

from pathlib import Path
from typing import Any

from sharding import ShardingError, checkpoint
from sharding.display.text_table import aligned

from .. import run_folder
from ..config.checkpoint_config import Checkpoint, Export, Import, Inspect, Verify


def run(config: Checkpoint) -> None:
    """Run the action of `config` and print its result."""
    match config.action:
        case Inspect() as action:
            print(inspect(action))
        case Verify() as action:
            print(verify(action))
        case Export() as action:
            names = checkpoint.export_tensors(_found(action.folder), action.out, step=action.step, prefix=action.prefix)
            print(f"{action.out}: {len(names)} tensors, {_megabytes(action.out.stat().st_size)}")
        case Import() as action:
            print(import_file(action))


def inspect(action: Inspect) -> str:
    """A folder's checkpoints, and the arrays and settings of one of them, as text."""
    found = _found(action.folder)
    shown = checkpoint.describe(found, action.step)
    metrics, best = checkpoint.figures(found), checkpoint.best_step(found)
    steps = [
        f"{step}" + (f" ({'best, ' if step == best else ''}{metrics[step]:.4g})" if step in metrics else "")
        for step in checkpoint.steps(found)
    ]
    arrays = [
        (
            array.name,
            "x".join(map(str, array.shape)) or "scalar",
            array.dtype,
            _spec(array.spec),
            f"{array.num_bytes:,}",
        )
        for array in shown.arrays
    ]
    return "\n".join(
        [
            f"folder  {found}",
            f"steps   {', '.join(steps)}",
            f"step    {shown.step}: {len(arrays)} arrays, {_megabytes(shown.num_bytes)}, "
            f"on disk {_megabytes(shown.disk_bytes)}",
            "",
            *aligned([("array", "shape", "dtype", "spec", "bytes"), *arrays]),
            "",
            *aligned([("setting", "value"), *_rows(shown.extra)]),
        ]
    )


def verify(action: Verify) -> str:
    """A line per checkpoint; raises an error if one is corrupted."""
    found = _found(action.folder)
    damage = checkpoint.verify(found, action.step)
    rows = [f"step {step}: {reason or 'ok'}" for step, reason in damage.items()]
    if not rows or any(damage.values()):
        raise ShardingError(
            f"verify {str(found)!r}", found=rows or "no checkpoint", required="checkpoints that match their checksums"
        )
    return "\n".join(rows)


def import_file(action: Import) -> str:
    """Write the tensors of a file as a checkpoint; a line of text that names it."""
    if action.step in checkpoint.steps(action.out):
        raise ShardingError(
            f"import {str(action.file)!r} --out {action.out} --step {action.step}",
            found=f"steps {', '.join(map(str, checkpoint.steps(action.out)))}",
            required="a step without a checkpoint",
            fix=["another --step", "another --out"],
        )
    tensors = checkpoint.read_tensors(action.file)
    state = {action.prefix + name: tensor for name, tensor in tensors.items()}
    with checkpoint.Saver(action.out, keep=len(checkpoint.steps(action.out)) + 1) as saver:
        saver.save(action.step, state, {"imported": str(action.file)})
    return f"{action.out}: step {action.step}, {len(state)} arrays"


def _found(given: Path) -> Path:
    """The folder of checkpoints: the one given, or that inside a run's folder."""
    inner = given / run_folder.CHECKPOINTS
    return inner if inner.is_dir() else given


def _spec(spec: tuple[tuple[str, ...], ...] | None) -> str:
    """A spec as in a completion: the axes per dim, `-` for none."""
    if spec is None:
        return ""
    return "[" + ", ".join("*".join(axes) or "-" for axes in spec) + "]"


def _rows(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Nested dicts as rows with dotted names."""
    if not isinstance(value, dict):
        return [(prefix.removesuffix(".") or "extra", str(value))]
    return [row for name, inner in value.items() for row in _rows(inner, f"{prefix}{name}.")]


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.2f} MB"
