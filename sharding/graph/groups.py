"""What annotations say of a group together: its members have one spec, so their annotations have to fit in one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..errors import ShardingError, raise_together
from ..spec import Dim, Spec
from .graph import Graph, Pin, line


def pinned(graph: Graph) -> Mapping[int, Pin]:
    """The annotations of a graph; those of a group's members as one, at the value that stands for the group.

    Raises:
        ShardingError: annotations of one group that contradict each other; all such pairs in one error.
    """
    if not graph.groups:
        return graph.pins
    found: dict[int, Pin] = {}
    failures = []
    for v, pin in graph.pins.items():
        home = graph.homes[v]
        have = found.get(home)
        both = pin.spec if have is None else joint(have.spec, pin.spec)
        if both is None:
            failures.append(_contradiction(graph, v))
        else:
            found[home] = pin if have is None else replace(have, spec=both)
    raise_together("sharding.same", failures)
    return found


def all_pins(graph: Graph) -> Mapping[int, Pin]:
    """What is asked of every value: by its own annotation, or by those of its group."""
    if not graph.groups:
        return graph.pins
    pins = pinned(graph)
    tied = {v: pins[graph.homes[v]] for group in graph.groups for v in group.members if graph.homes[v] in pins}
    return {**graph.pins, **tied}


def joint(a: Spec, b: Spec) -> Spec | None:
    """The spec that meets two annotations at once; None if there is none."""
    dims = [_joint(x, y) for x, y in zip(a.dims, b.dims, strict=True)]
    found = tuple(dim for dim in dims if dim is not None)
    axes = [axis for dim in found for axis in dim.axes]
    return Spec(dims=found) if len(found) == len(dims) and len(set(axes)) == len(axes) else None


def _joint(x: Dim, y: Dim) -> Dim | None:
    if y.open and not y.axes:
        return x
    if x.open and not x.axes:
        return y
    short, long = sorted((x, y), key=lambda dim: len(dim.axes))
    fits = long.axes[: len(short.axes)] == short.axes and (short.open or short.axes == long.axes)
    return replace(long, open=x.open and y.open, priority=min(x.priority, y.priority)) if fits else None


def _contradiction(graph: Graph, v: int) -> ShardingError:
    """The error for a member's annotation that doesn't fit one before it."""
    pin, members = graph.pins[v], graph.members(v)
    earlier = next(u for u in graph.pins if u in members and joint(graph.pins[u].spec, pin.spec) is None)
    site = graph.tied_at(v, earlier)
    return ShardingError(
        f"sharding.same at {line(site)}",
        there=[f"{graph.label(u)} {graph.pins[u].spec} from {graph.pins[u].origin}" for u in (earlier, v)],
        must="the members of a group get one spec",
        fix="the same spec in both annotations, or P.UNCONSTRAINED in one of them",
    )
