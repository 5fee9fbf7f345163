"""The shardings of arguments and results, as pytrees of specs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

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
    """The spec of an argument or result; in the host's memory a `NamedSharding`, which names its kind of memory."""
    spec, sizes = to_partition_spec(assignment.boundary_spec(value)), assignment.sizes
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    return spec if kind is None else NamedSharding(mesh, spec, memory_kind=kind)
