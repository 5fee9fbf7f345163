"""An annotation added to those of a completed program."""

from __future__ import annotations

from jax.sharding import PartitionSpec as P

from ..annotations import axis_rules
from ..errors import ShardingError
from ..graph import Annotation, joined
from ..propagation import Assignment
from ..spec import indivisible, to_partition_spec


def added_annotation(assignment: Assignment, name: str, v: int, spec: P, priority: int) -> Annotation:
    """The annotation of a value after adding another.

    Raises:
        ShardingError: an invalid spec for this array, a conflict with its annotation, or, for an argument or result, a
            spec that does not divide it.
    """
    graph = assignment.graph
    asked = f"annotate({name!r}, {spec})"
    shape, sizes = graph.shapes[v], assignment.sizes
    annotation = Annotation(spec=axis_rules.resolve(spec, shape, sizes, asked=asked, priority=priority), origin=asked)
    faults = indivisible(annotation.spec, shape, sizes)
    if faults and v in (*graph.inputs, *graph.outputs):
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
