"""The shardings of arguments and results, as pytrees of specs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ..mesh import current
from ..propagation import Assignment
from ..spec import to_partition_spec


def of_arguments(assignment: Assignment, trees: Sequence[Any]) -> tuple[Any, ...]:
    """The specs of the arguments: one pytree per argument, with its structure."""
    kinds = assignment.graph.memory_kinds
    specs = [_in_memory(assignment, v, kinds.get(v)) for v in assignment.graph.inputs]
    found, at = [], 0
    for tree in trees:
        found.append(jax.tree.unflatten(tree, specs[at : at + tree.num_leaves]))
        at += tree.num_leaves
    return tuple(found)


def of_result(assignment: Assignment, tree: Any) -> Any:
    """The specs of the result, a pytree with its structure."""
    graph = assignment.graph
    pairs = list(zip(graph.outputs, graph.output_memory_kinds, strict=True))
    of_result = pairs[: tree.num_leaves]  # behind it: the new values of arguments that are changed
    return jax.tree.unflatten(tree, [_in_memory(assignment, v, kind) for v, kind in of_result])


def _in_memory(assignment: Assignment, value: int, kind: str | None) -> P | NamedSharding:
    """The spec of an argument or result; in the host's memory a `NamedSharding`, which names its kind of memory.

    It is on the current mesh where this has the program's axes: that of a completion which was saved is described.
    """
    spec, sizes = to_partition_spec(assignment.boundary_spec(value)), dict(assignment.sizes)
    if kind is None:
        return spec
    mesh = current()
    if mesh is None or dict(mesh.shape) != sizes:
        mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    return NamedSharding(mesh, spec, memory_kind=kind)
