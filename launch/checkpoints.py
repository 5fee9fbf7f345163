"""`sharding checkpoint`: what lies in a folder of checkpoints, and its parameters as safetensors files."""

from pathlib import Path
from typing import Any

from sharding import ShardingError, checkpoint
from sharding.columns import aligned

from . import folder
from .checkpoint_config import Checkpoint, Export, Import, Inspect, Verify


def run(config: Checkpoint) -> None:
    """Do what `config` asks for, and print what came of it."""
    match config.action:
        case Inspect() as action:
            print(inspected(action))
        case Verify() as action:
            print(verified(action))
        case Export() as action:
            names = checkpoint.export_tensors(_found(action.folder), action.out, step=action.step, prefix=action.prefix)
            print(f"{action.out}: {len(names)} tensors, {_megabytes(action.out.stat().st_size)}")
        case Import() as action:
            print(imported(action))


def inspected(action: Inspect) -> str:
    """The checkpoints of a folder, and one of them, as text."""
    found = _found(action.folder)
    shown = checkpoint.describe(found, action.step)
    figures, best = checkpoint.figures(found), checkpoint.best_step(found)
    steps = [
        f"{step}" + (f" ({'best, ' if step == best else ''}{figures[step]:.4g})" if step in figures else "")
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


def verified(action: Verify) -> str:
    """That the checkpoints of a folder are whole."""
    found = _found(action.folder)
    damage = checkpoint.verify(found, action.step)
    rows = [f"step {step}: {reason or 'whole'}" for step, reason in damage.items()]
    if not rows or any(damage.values()):
        there = rows or "no checkpoint"
        raise ShardingError(f"verify {str(found)!r}", there=there, must="a checkpoint must be whole")
    return "\n".join(rows)


def imported(action: Import) -> str:
    """Where the tensors of a file lie, once they are a checkpoint."""
    if action.step in checkpoint.steps(action.out):
        raise ShardingError(
            f"import {str(action.file)!r} --out {action.out} --step {action.step}",
            there=f"steps {', '.join(map(str, checkpoint.steps(action.out)))}",
            must="a checkpoint that is there is not replaced",
            fix="--out with another folder",
        )
    tensors = checkpoint.read_tensors(action.file)
    state = {action.prefix + name: tensor for name, tensor in tensors.items()}
    with checkpoint.Saver(action.out, keep=len(checkpoint.steps(action.out)) + 1) as saver:
        saver.save(action.step, state, {"imported": str(action.file)})
    return f"{action.out}: step {action.step}, {len(state)} arrays"


def _found(given: Path) -> Path:
    """The folder of the checkpoints themselves."""
    inner = given / folder.CHECKPOINTS
    return inner if inner.is_dir() else given


def _spec(spec: tuple[tuple[str, ...], ...] | None) -> str:
    """As completions write it: per dim its axes, `-` for none."""
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
