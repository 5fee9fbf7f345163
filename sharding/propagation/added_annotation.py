"""One more annotation of one or several values, beside those that a program has."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping

from jax.sharding import PartitionSpec as P

from .. import paths
from ..annotations import axis_rules
from ..errors import ShardingError, raise_together
from ..graph import Annotation, Graph, Places, joined
from ..spec import indivisible, to_partition_spec


def with_annotation(
    graph: Graph, name: str, v: int, spec: P, sizes: Mapping[str, int], *, priority: int, is_end: bool
) -> Annotation:
    """The annotation of a value after adding another.

    Args:
        graph: the program.
        name: of the value, for errors.
        v: the value.
        spec: to add.
        sizes: mesh axis sizes.
        priority: of the annotation.
        is_end: whether the value is an argument or a result, whose dims must be divisible.

    Raises:
        ShardingError: an invalid or indivisible spec, or one that contradicts the annotation that the value has.
    """
    asked = f"annotate({name!r}, {spec})"
    shape = graph.shapes[v]
    annotation = Annotation(spec=axis_rules.resolve(spec, shape, sizes, asked=asked, priority=priority), origin=asked)
    faults = indivisible(annotation.spec, shape, sizes)
    if faults and is_end:
        raise ShardingError(
            asked,
            found=[f"shape {shape}", *faults],
            required="dims of arguments and results divisible by the product of their axis sizes",
        )
    have = graph.annotations.get(v)
    both = annotation if have is None else joined(have, annotation)
    if both is None:
        assert have is not None
        raise ShardingError(
            asked,
            found=f"{to_partition_spec(have.spec, keep_open=True)} from {have.origin}",
            required="annotations of one value that agree on each dim, or leave it open",
            fix="P.UNCONSTRAINED for the dims annotated already, or a program without that annotation",
        )
    return both


def with_annotations(
    graph: Graph,
    found: Mapping[str, int],
    spec: P,
    sizes: Mapping[str, int],
    *,
    priority: int,
    ends: Collection[int],
    asked: str,
) -> dict[int, Annotation]:
    """The annotations of several values after adding another; as `with_annotation`, with all errors together.

    Args:
        graph: the program.
        found: name -> value.
        spec: to add.
        sizes: mesh axis sizes.
        priority: of the annotation.
        ends: the arguments and results.
        asked: the request, for errors.
    """
    annotations: dict[int, Annotation] = {}
    failures: list[ShardingError] = []
    for name, v in found.items():
        try:
            annotations[v] = with_annotation(graph, name, v, spec, sizes, priority=priority, is_end=v in ends)
        except ShardingError as error:
            failures.append(error)
    raise_together(asked, failures)
    return annotations


def named_annotations(
    graph: Graph,
    annotations: Mapping[str, P],
    sizes: Mapping[str, int],
    lookup: Callable[[str], Mapping[str, int]] | None = None,
) -> dict[int, Annotation]:
    """The annotations of values by name, as a plan has them.

    Args:
        graph: the program.
        annotations: name, as `Completion.annotate` takes it -> spec.
        sizes: mesh axis sizes.
        lookup: the values that a name is of. Default: as `Completion.annotate` finds them.

    Raises:
        ShardingError: the program has no such value, or the spec does not fit it.
    """
    found: dict[int, Annotation] = {}
    ends = frozenset((*graph.inputs, *graph.outputs))
    find = functools.partial(paths.find_all, graph.names, places=Places(graph)) if lookup is None else lookup
    for name, spec in annotations.items():
        values = find(name)
        asked = f"plan: {name} as {spec}"
        found.update(with_annotations(graph, values, spec, sizes, priority=0, ends=ends, asked=asked))
    return found
