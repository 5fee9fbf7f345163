"""The `--mesh` option: its syntax, its axes, and the batch sizes that a mesh divides."""

import difflib
import math

from sharding.errors import ShardingError

from .pipeline_config import PipelineConfig

MESH_AXES = ("data", "fsdp", "tensor", "expert", "pipe", "seq")
"""The axes of the layouts in `models`, of pipeline stages and of sequences."""

BATCH_AXES = ("data", "fsdp", "expert")
"""The axes over which a batch is sharded."""


def parse_mesh(text: str) -> dict[str, int]:
    """Axis sizes by name, in order, from a text such as `data=2,tensor=4`."""
    axes: dict[str, int] = {}
    problems = []
    for part in text.split(","):
        name, equals, number = (piece.strip() for piece in part.partition("="))
        problem = _axis_problem(name, equals, number, axes)
        if problem:
            problems.append(problem)
        else:
            axes[name] = int(number)
    if sum(size == -1 for size in axes.values()) > 1:
        problems.append("more than one size is -1")
    if problems:
        raise ShardingError(
            f"--mesh {text}",
            found=problems,
            required=f"name=size,name=size with distinct names among {', '.join(MESH_AXES)}",
            fix="--mesh data=2,fsdp=2,tensor=2",
        )
    return axes


def _axis_problem(name: str, equals: str, number: str, axes: dict[str, int]) -> str:
    digits = number.removeprefix("-")
    if not (name and equals and digits.isascii() and digits.isdigit()):
        return f"{name + equals + number!r} is not name=size"
    if name not in MESH_AXES:
        near = difflib.get_close_matches(name, MESH_AXES, n=1, cutoff=0.4)
        return f"unknown axis {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")
    if name in axes:
        return f"axis {name!r} is repeated"
    if int(number) < 1 and int(number) != -1:
        return f"the size of {name!r} is {number}, not at least 1"
    return ""


def batch_parts(axes: dict[str, int]) -> int:
    """Number of shards of a batch on a mesh with these axes. All sizes must be known."""
    return math.prod(axes.get(axis, 1) for axis in BATCH_AXES)


def check_batch(batch: int, axes: dict[str, int], accumulate: int = 1, pipeline: PipelineConfig | None = None) -> None:
    """Raise an error unless `axes` shard each microbatch of `batch` examples evenly.

    A mesh with an axis of size -1 is not checked.
    """
    if -1 in axes.values():
        return
    times = {"accumulate": accumulate, "microbatches": 1 if pipeline is None else pipeline.microbatches}
    times = {name: number for name, number in times.items() if number > 1}
    parts = batch_parts(axes) * math.prod(times.values())
    if batch % parts == 0:
        return
    factors = [f"{axis}={axes[axis]}" for axis in BATCH_AXES if axis in axes]
    names = " * ".join([*factors, *(f"{name}={number}" for name, number in times.items())])
    lower, upper = batch // parts * parts, (batch // parts + 1) * parts
    near = lower if lower and batch - lower < upper - batch else upper
    raise ShardingError(
        " ".join([f"--batch {batch}", *(f"--{name} {number}" for name, number in times.items())]),
        found=f"{names} = {parts} parts; {batch} / {parts} = {batch / parts:g}",
        required="equally many examples per batch shard" + (" and microbatch" if times else ""),
        fix=f"--batch {near}",
    )
