"""Explanations as text: the chain from an axis to its annotation; repeated layers are printed once."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..errors import ShardingError
from ..graph import Graph
from ..propagation import Assignment, Reason
from ..spec import axis_name
from .replication_reasons import ReplicatedDims

MAX_PERIOD = 256
"""The longest repeated sequence of steps that is searched for; one layer has fewer."""


@dataclass(frozen=True, slots=True)
class Why:
    """The steps from an axis on a dim back to the annotation it came from; prints one step per line."""

    lines: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.lines)

    __repr__ = __str__

    def __iter__(self) -> Iterator[str]:
        return iter(self.lines)


def why(assignment: Assignment, replicated: ReplicatedDims, name: str, value: int, dim: int | None = None) -> Why:
    """The chain of reasons of each axis on a dim of a value, by default on all dims, or why a dim is replicated.

    Raises:
        ShardingError: a value without that dim.
    """
    spec, ndim = assignment.specs[value], len(assignment.graph.shapes[value])
    if dim is not None and not -ndim <= dim < ndim:
        raise ShardingError(
            f"why({name!r}, dim={dim})",
            found=f"{ndim} dims: {assignment.graph.shapes[value]}",
            required=f"0 <= dim < {ndim}",
        )
    lines = [] if ndim else [f"{name} is a scalar"]
    for d in range(ndim) if dim is None else [dim % ndim]:
        if not spec.dims[d].axes:
            lines.append(f"{name} dim {d} is replicated: {replicated.why(value, d)}")
        for axis in spec.dims[d].axes:
            lines.append(f"{name} dim {d} is sharded over {axis_name(axis)}:")
            lines += [f"  {line}" for line in chain_lines(assignment.graph, assignment.chain(value, d, axis))]
    if value in assignment.graph.replicated_by_default and any(spec.axes):
        lines.append(
            f"{name} was passed replicated as JAX creates arrays under a mesh, which leaves its sharding open: "
            "in_shardings=P() or an array with the spec P(None, ...) keeps it replicated"
        )
    return Why(tuple(lines))


def chain_lines(graph: Graph, steps: Iterable[tuple[int, int, Reason]]) -> list[str]:
    """One line per (value, dim, reason); the steps of repeated layers are written once."""
    lines = [_step(graph, *step) for step in steps]
    found: list[str] = []
    for start, period, times in repeats(list(map(graph.layers.pattern, lines))):
        found += lines[start : start + period]
        if times > 1:
            what = "this step repeats" if period == 1 else f"these {period} steps repeat"
            found.append(f"({what} {times - 1} more time{'s' if times > 2 else ''})")
    return found


def _step(graph: Graph, value: int, dim: int, reason: Reason) -> str:
    who = f"{graph.label(value)} dim {dim}"
    if reason.value is None:
        return f"{who} <- {origin(graph, value, dim, reason)}"
    at, of = f" at {reason.source}" if reason.source else "", f", from {reason.array}" if reason.array else ""
    return f"{who} <- {reason.word}{at}{of}"


def origin(graph: Graph, value: int, dim: int, reason: Reason) -> str:
    """The annotation that a chain ends at."""
    annotation = graph.annotations.get(value)
    is_stored = annotation is not None and annotation.spec.dims[dim].is_stored
    return reason.source + (", stored so: the batch has the axis first" if is_stored else "")


def repeats(items: Sequence[Hashable]) -> Iterator[tuple[int, int, int]]:
    """(start, period, times) of runs that cover the sequence; an item that does not repeat has period and times 1.

    Greedy: at each position the longest run, and the shortest period among equally long ones.
    """
    at = 0
    while at < len(items):
        period, times = max(_runs(items, at), key=lambda run: (run[0] * run[1], -run[0]))
        yield at, period, times
        at += period * times


def _runs(items: Sequence[Hashable], at: int) -> Iterator[tuple[int, int]]:
    yield 1, 1
    for period in range(1, min(MAX_PERIOD, (len(items) - at) // 2) + 1):
        times = 1
        while items[at : at + period] == items[at + times * period : at + (times + 1) * period]:
            times += 1
        if times > 1:
            yield period, times
