"""Sub-axes: refines a mesh over the same devices so that a sub-axis is an axis of its own.

A reshape may shard two dims over one mesh axis: a dim of 8 sharded over `tensor=4` becomes 2 x 4, sharded over the two
halves of `tensor`. A `PartitionSpec` over the mesh cannot express that; over the refined mesh it can.
"""

from __future__ import annotations

import itertools

from jax.sharding import AbstractMesh

from ..spec import Axis, Dim, Spec, axis_size, cuts


def refine(mesh: AbstractMesh, spec: Spec) -> tuple[AbstractMesh, Spec]:
    """Returns a mesh in which every sub-axis in `spec` is an axis, and the spec over it.

    The sub-axes of `tensor` are named `tensor:0`, `tensor:1`, ... major to minor. Without sub-axes, returns both
    unchanged.
    """
    if not spec.has_sub_axes:
        return mesh, spec
    sizes = dict(mesh.shape)
    boundaries = cuts((axis for dim in spec.dims for axis in dim.axes), sizes)
    parts = {name: _sub_axes(name, boundaries.get(name, [1, size])) for name, size in sizes.items()}
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    axes = [(name, new, size) for name in sizes for new, _, size in parts[name]]
    refined = mesh.update(
        axis_sizes=tuple(size for _, _, size in axes),
        axis_names=tuple(new for _, new, _ in axes),
        axis_types=tuple(types[name] for name, _, _ in axes),
    )

    def sub_axes(axis: Axis) -> list[Axis]:
        name, first = (axis, 1) if isinstance(axis, str) else axis[:2]
        last = first * axis_size(axis, sizes)
        return [new for new, pre, _ in parts[name] if first <= pre < last]

    dims = tuple(Dim(axes=tuple(a for axis in dim.axes for a in sub_axes(axis)), open=dim.open) for dim in spec.dims)
    return refined, Spec(dims=dims)


def _sub_axes(name: str, ends: list[int]) -> list[tuple[str, int, int]]:
    """Returns (new name, pre-size, size) of each sub-axis between the boundaries of an axis."""
    if len(ends) < 3:
        return [(name, 1, ends[-1])]
    return [(f"{name}:{i}", pre, end // pre) for i, (pre, end) in enumerate(itertools.pairwise(ends))]
