"""Mesh axes that tokens and experts are sharded over, and their checks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
from jax.sharding import PartitionSpec as P

from ..errors import ShardingError
from ..mesh import current
from ..spec import sizes_text


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshAxes:
    """Mesh axes used by an MoE layer."""

    expert: str | None
    """Shards the experts, and the tokens minor to ``batch``; None: experts are replicated."""
    batch: tuple[str, ...]
    """Shard the tokens only."""
    hidden: str | None
    """Shards the hidden features of each expert."""
    length: str | None
    """Shards the tokens of a group, and the expert slots of that group."""
    sizes: Mapping[str, int]
    """Axis sizes of the mesh, without manual axes."""

    @property
    def expert_axis_size(self) -> int:
        """Size of the expert axis; 1 without one."""
        return 1 if self.expert is None else self.sizes[self.expert]

    def group_axes(self, num_groups: int) -> tuple[str, ...]:
        """The most axes, major first, that divide this number of groups."""
        return self._longest_divisor(num_groups, self._batch_axes)

    def token_spec(self, num_groups: int, length: int) -> P | None:
        """The spec of tokens [groups, length, ...] over all axes; None where these don't divide groups and length."""
        axes, parts = self._batch_axes, 1 if self.length is None else self.sizes[self.length]
        return P(axes or None, self.length) if self.group_axes(num_groups) == axes and length % parts == 0 else None

    def token_axes(self, num_tokens: int) -> tuple[str, ...]:
        """The most axes, major first, that divide the tokens of all groups."""
        return self._longest_divisor(
            num_tokens, self._batch_axes if self.length is None else (*self._batch_axes, self.length)
        )

    def slot_axis(self, capacity: int) -> str | None:
        """The length axis if it divides the slots of an expert."""
        return None if self.length is None or capacity % self.sizes[self.length] else self.length

    @property
    def _batch_axes(self) -> tuple[str, ...]:
        return self.batch if self.expert is None else (*self.batch, self.expert)

    def _longest_divisor(self, number: int, names: tuple[str, ...]) -> tuple[str, ...]:
        ends = range(len(names), 0, -1)
        fits = (names[:end] for end in ends if number % math.prod(self.sizes[name] for name in names[:end]) == 0)
        return next(fits, ())


def resolve_axes(
    asked: str,
    *,
    axis: str | None,
    batch: Sequence[str],
    hidden: str | None,
    length: str | None,
    num_experts: int,
    features: int,
) -> MeshAxes | None:
    """The axes of the mesh in context; None without a mesh.

    Args:
        asked: the request, for error messages.
        axis: the expert axis, which the mesh must have.
        batch: other axes that shard the batch; those absent from the mesh are ignored.
        hidden: the axis that shards hidden features; ignored if absent from the mesh.
        length: the axis that shards the sequence length; ignored if absent from the mesh.
        num_experts: must be divisible by `axis`.
        features: hidden features; must be divisible by `hidden`.
    """
    mesh = current()
    if mesh is None:
        return None
    manual = jax.sharding.get_abstract_mesh().manual_axes  # of enclosing shard_maps, where arrays are local
    sizes = {name: size for name, size in mesh.shape.items() if name not in manual}
    found = MeshAxes(
        expert=axis,
        batch=tuple(name for name in batch if name in sizes and name != axis),
        hidden=hidden if hidden in sizes else None,
        length=length if length in sizes else None,
        sizes=sizes,
    )
    if axis is not None:
        _check_axis(asked, axis, sizes, num_experts)
    if found.hidden is not None and features % sizes[found.hidden]:
        raise ShardingError(
            f"{asked}: hidden={features}",
            found=f"hidden_axis={found.hidden!r} of size {sizes[found.hidden]}",
            required="an axis size that divides the hidden features",
            fix=f"hidden={-(-features // sizes[found.hidden]) * sizes[found.hidden]}",
        )
    return found


def _check_axis(asked: str, axis: str, sizes: Mapping[str, int], num_experts: int) -> None:
    if axis not in sizes:
        raise ShardingError(
            f"{asked}: axis={axis!r}",
            found=f"mesh axes {sizes_text(sizes)}",
            required=f"a mesh axis {axis!r}, if only of size 1",
            fix=[f"sharding.mesh(..., {axis}=1)", "axis=None, to replicate the experts"],
        )
    if num_experts % sizes[axis]:
        rounded = -(-num_experts // sizes[axis]) * sizes[axis]
        raise ShardingError(
            f"{asked}: num_experts={num_experts}",
            found=f"axis={axis!r} of size {sizes[axis]}",
            required="an axis size that divides the experts",
            fix=f"num_experts={rounded}",
        )
