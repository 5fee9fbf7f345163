"""Which axes of the mesh split tokens and experts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
from jax.sharding import Mesh

from ..errors import ShardingError
from ..mesh import current, described
from ..spec import sizes_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The axes of the mesh in force that a layer of experts uses."""

    expert: str | None
    """Splits the experts, and tokens behind ``batch``; None where every device has all experts."""
    batch: tuple[str, ...]
    """Split the tokens alone."""
    hidden: str | None
    """Splits the hidden features of each expert."""
    length: str | None
    """Splits the tokens of a group, and each expert's places for it."""
    sizes: Mapping[str, int]
    """Of all axes of the mesh that a program can name."""

    @property
    def num_expert_parts(self) -> int:
        """Into how many parts the experts are split."""
        return 1 if self.expert is None else self.sizes[self.expert]

    def of_groups(self, number: int) -> tuple[str, ...]:
        """The axes, major first, that split so many groups evenly: as many of them as can."""
        return self._dividing(number, self._of_batch)

    def of_tokens(self, number: int) -> tuple[str, ...]:
        """The same of the tokens of all groups."""
        return self._dividing(number, self._of_batch if self.length is None else (*self._of_batch, self.length))

    def of_places(self, number: int) -> str | None:
        """The axis that splits so many places of an expert, if one does evenly."""
        return None if self.length is None or number % self.sizes[self.length] else self.length

    @property
    def _of_batch(self) -> tuple[str, ...]:
        return self.batch if self.expert is None else (*self.batch, self.expert)

    def _dividing(self, number: int, names: tuple[str, ...]) -> tuple[str, ...]:
        ends = range(len(names), 0, -1)
        fits = (names[:end] for end in ends if number % math.prod(self.sizes[name] for name in names[:end]) == 0)
        return next(fits, ())


def of_mesh(
    asked: str,
    *,
    axis: str | None,
    batch: Sequence[str],
    hidden: str | None,
    length: str | None,
    num_experts: int,
    features: int,
) -> Axes | None:
    """The axes of the mesh in force; None where there is none.

    Args:
        asked: who asks.
        axis: that splits the experts, which the mesh must have.
        batch: the axes that split the batch beside it; those that the mesh doesn't have are left out.
        hidden: the axis that splits hidden features, if the mesh has it.
        length: the axis that splits the length of sequences, if the mesh has it.
        num_experts: that `axis` must divide.
        features: hidden ones, that `hidden` must divide.
    """
    mesh = current()
    if mesh is None:
        return None
    manual = jax.sharding.get_abstract_mesh().manual_axes  # of the shard_maps around: there each is of one device
    sizes = {name: size for name, size in mesh.shape.items() if name not in manual}
    found = Axes(
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
            there=f"hidden_axis={found.hidden!r} of size {sizes[found.hidden]}",
            must="the axis divides the hidden features of an expert",
            fix=f"hidden={-(-features // sizes[found.hidden]) * sizes[found.hidden]}",
        )
    return found


def _check_axis(asked: str, axis: str, sizes: Mapping[str, int], num_experts: int) -> None:
    if axis not in sizes:
        raise ShardingError(
            f"{asked}: axis={axis!r}",
            there=f"the mesh {sizes_text(sizes)}",
            must=f"the mesh has an axis {axis!r}; size 1 will do",
            fix=[f"sharding.mesh(..., {axis}=1)", "axis=None, for all experts on every device"],
        )
    if num_experts % sizes[axis]:
        more = -(-num_experts // sizes[axis]) * sizes[axis]
        raise ShardingError(
            f"{asked}: num_experts={num_experts}",
            there=f"axis={axis!r} of size {sizes[axis]}",
            must="the axis divides the experts",
            fix=f"num_experts={more}",
        )


def platform() -> str:
    """JAX's name for the platform that the mesh in force is of; empty for devices of no kind."""
    mesh, known = current(), described()
    if known is not None:
        return known.chip.platform
    if isinstance(mesh, Mesh):
        return mesh.devices.flat[0].platform
    return ""
