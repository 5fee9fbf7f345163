"""Annotations of sharding groups (`sharding.same`): the members share one spec, so their annotations are combined."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..errors import ShardingError, raise_together
from ..spec import Dim, Spec
from .annotation import Annotation
from .graph import Graph, line


def group_annotations(graph: Graph) -> Mapping[int, Annotation]:
    """Returns the annotations of a graph, those of a group's members combined at the group's representative.

    Raises:
        ShardingError: conflicting annotations in a group, all such pairs in one error.
    """
    if not graph.groups:
        return graph.annotations
    found: dict[int, Annotation] = {}
    failures = []
    for v, annotation in graph.annotations.items():
        home = graph.representatives[v]
        have = found.get(home)
        both = annotation.spec if have is None else combined(have.spec, annotation.spec)
        if both is None:
            failures.append(_contradiction(graph, v))
        else:
            found[home] = annotation if have is None else replace(have, spec=both)
    raise_together("sharding.same", failures)
    return found


def value_annotations(graph: Graph) -> Mapping[int, Annotation]:
    """Returns the annotation of each value: its own, or that of its group."""
    if not graph.groups:
        return graph.annotations
    of_group, representatives = group_annotations(graph), graph.representatives
    members = [v for group in graph.groups for v in group.members if representatives[v] in of_group]
    return {**graph.annotations, **{v: of_group[representatives[v]] for v in members}}


def combined(a: Spec, b: Spec) -> Spec | None:
    """Returns the spec that satisfies two annotations, or None if they conflict."""
    dims = [_combined_dim(x, y) for x, y in zip(a.dims, b.dims, strict=True)]
    found = tuple(dim for dim in dims if dim is not None)
    axes = [axis for dim in found for axis in dim.axes]
    return Spec(dims=found) if len(found) == len(dims) and len(set(axes)) == len(axes) else None


def _combined_dim(x: Dim, y: Dim) -> Dim | None:
    if y.open and not y.axes:
        return x
    if x.open and not x.axes:
        return y
    short, long = sorted((x, y), key=lambda dim: len(dim.axes))
    fits = long.axes[: len(short.axes)] == short.axes and (short.open or short.axes == long.axes)
    return replace(long, open=x.open and y.open, priority=min(x.priority, y.priority)) if fits else None


def _contradiction(graph: Graph, v: int) -> ShardingError:
    """Returns the error for an annotation that conflicts with that of an earlier member."""
    annotation, members = graph.annotations[v], graph.members(v)
    earlier = next(
        u for u in graph.annotations if u in members and combined(graph.annotations[u].spec, annotation.spec) is None
    )
    site = graph.group_site(v, earlier)
    return ShardingError(
        f"sharding.same at {line(site)}" if site else "in_shardings of an nnx.Variable that occurs twice",
        found=[
            f"{graph.label(u)} {graph.annotations[u].spec} from {graph.annotations[u].origin}" for u in (earlier, v)
        ],
        required="one spec for all members of a group" if site else "one spec: it is one array",
        fix="the same spec in both annotations, or P.UNCONSTRAINED in one of them",
    )
