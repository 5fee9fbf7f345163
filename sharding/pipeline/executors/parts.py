"""Arrays over a whole mesh as arrays over the parts of it that the stages of a pipeline have, and back.

Where a part of the mesh already has what it needs, that is taken as it lies: nothing is copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ...spec import partition_spec_of
from ..schedule import Schedule
from .model import Ends

Slices = Sequence[Any]
"""A pytree with leaves [microbatches, ...] for each slice of the tokens; one where they are not cut."""
At = tuple[int, int]
"""(device on the pipeline's axis, stage)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Parts:
    """The mesh of each place on the pipeline's axis, and which stage's parameters lie where."""

    mesh: Mesh
    axis: str
    schedule: Schedule
    rows: tuple[int, ...]
    """The stage of each row of the stages' parameters; several rows may be copies of one."""

    @cached_property
    def meshes(self) -> tuple[Mesh, ...]:
        """The other axes, for each place on this one."""
        names = [name for name in self.mesh.axis_names if name != self.axis]
        types = [t for name, t in zip(self.mesh.axis_names, self.mesh.axis_types, strict=True) if name != self.axis]
        devices = np.moveaxis(self.mesh.devices, self.mesh.axis_names.index(self.axis), 0)
        return tuple(Mesh(each, tuple(names), axis_types=tuple(types)) for each in devices)

    @cached_property
    def homes(self) -> dict[tuple[int, int], int]:
        """(stage, microbatch or slice of one) -> device."""
        return {(t.stage, self.schedule.unit(t)): d for d, order in enumerate(self.schedule.orders) for t in order}

    def home(self, stage: int, unit: int) -> int:
        """The device that has a microbatch, or a slice of one, at a stage."""
        return self.homes[stage, unit]

    @property
    def places(self) -> list[At]:
        """Every stage on every device that has it."""
        return [(device, stage) for device, own in enumerate(self.schedule.placement) for stage in own]

    def where(self, stage: int) -> tuple[int, ...]:
        """The devices that have a stage."""
        return tuple(device for device, own in enumerate(self.schedule.placement) if stage in own)

    def stages(self, tree: Any) -> dict[At, Any]:
        """The parameters of each stage on each device that has it, with a leading dim of 1."""
        leaves, tree_def = jax.tree.flatten(tree)
        cut = [self._rows(leaf) for leaf in leaves]
        found = {}
        for device, stage in self.places:
            source = self._row(stage, device)
            rows = [self.moved(rows[source], device, source // self._per_device) for rows in cut]
            found[device, stage] = jax.tree.unflatten(tree_def, rows)
        return found

    def stage_shardings(self, tree: Any) -> list[Any]:
        """Per device those of a stage's parameters."""
        return [
            jax.tree.map(lambda leaf, mesh=mesh: NamedSharding(mesh, P(None, *self._spec(leaf)[1:])), tree)
            for mesh in self.meshes
        ]

    def joined(self, sums: Mapping[At, Any], like: Any) -> Any:
        """Gradients of each stage on each device, as the parameters lie; a stage's copies are added up."""
        leaves, tree_def = jax.tree.flatten(like)
        flat = {at: jax.tree.leaves(tree) for at, tree in sums.items()}
        return jax.tree.unflatten(tree_def, [self._joined(flat, i, leaf) for i, leaf in enumerate(leaves)])

    def each(self, tree: Any) -> list[Any]:
        """[places on the axis, ...] as one for each place, on its mesh."""
        leaves, tree_def = jax.tree.flatten(tree)
        cut = [self._rows(leaf) for leaf in leaves]
        found = []
        for device, mesh in enumerate(self.meshes):
            with jax.set_mesh(mesh):
                found += _unstacked(jax.tree.unflatten(tree_def, [rows[device] for rows in cut]), 1)
        return found

    def replica(self, tree: Any, device: int) -> Any:
        """What every device has a copy of, on one of them."""
        return jax.tree.map(lambda leaf: self._local(_placed(leaf, self.mesh, self._spec(leaf)), device), tree)

    def units(self, slices: Slices, device: int) -> list[Any]:
        """All microbatches as so many arrays on a device, or all slices of each side by side."""
        with jax.set_mesh(self.meshes[device]):
            cut = [_unstacked(self.replica(tree, device), self.schedule.microbatches) for tree in slices]
        return [unit for microbatch in zip(*cut, strict=True) for unit in microbatch]

    def zero(self, device: int) -> jax.Array:
        """A scalar 0 there."""
        return jax.device_put(np.zeros((), np.float32), NamedSharding(self.meshes[device], P()))

    def moved(self, tree: Any, device: int, source: int) -> Any:
        """Arrays of one device on another, split there as here."""
        return tree if device == source else self.brought(tree, device)

    def brought(self, tree: Any, device: int) -> Any:
        """Arrays of any other mesh on a device, split there as on that."""
        mesh = self.meshes[device]
        return jax.device_put(tree, jax.tree.map(lambda leaf: NamedSharding(mesh, partition_spec_of(leaf)), tree))

    def total(self, losses: Mapping[int, jax.Array]) -> jax.Array:
        """A sum over devices, on the whole mesh."""
        return jax.device_put(self._sum(losses), NamedSharding(self.mesh, P()))

    def ends_total(self, sums: Mapping[int, Ends], like: Ends) -> Ends:
        """Sums over devices, as the ends lie."""
        return self.placed(self._sum(sums), like)

    def placed(self, tree: Any, like: Any) -> Any:
        """Arrays of one device on the whole mesh, as others lie."""
        return jax.tree.map(
            lambda leaf, found: jax.device_put(found, NamedSharding(self.mesh, self._spec(leaf, whole=False))),
            like,
            tree,
        )

    @property
    def _per_device(self) -> int:
        return len(self.rows) // len(self.meshes)

    def _row(self, stage: int, device: int) -> int:
        """The row with a stage's parameters: this device's own, if it has one."""
        found = [row for row, each in enumerate(self.rows) if each == stage]
        own = [row for row in found if row // self._per_device == device]
        return (own or found)[0]

    def _rows(self, leaf: jax.Array) -> list[jax.Array]:
        """[rows, ...] as rows [1, ...], each where it lies."""
        placed = _placed(leaf, self.mesh, P(self.axis, *self._spec(leaf)[1:]))
        local = [self._local(placed, device) for device in range(len(self.meshes))]
        if self._per_device == 1:
            return local
        rows = []
        for mesh, part in zip(self.meshes, local, strict=True):
            with jax.set_mesh(mesh):
                rows += _rows(part, self._per_device, part.sharding)
        return rows

    def _joined(self, sums: Mapping[At, Sequence[jax.Array]], i: int, like: jax.Array) -> jax.Array:
        parts = []
        for home, mesh in enumerate(self.meshes):
            own = []
            for stage in self.rows[home * self._per_device :][: self._per_device]:
                copies = {device: sums[device, stage][i] for device in self.where(stage)}
                own.append(self._sum(copies, home))
            with jax.set_mesh(mesh):
                parts.append(own[0] if len(own) == 1 else _stacked(own, own[0].sharding))
        spec = P(self.axis, *self._spec(like)[1:])
        data = {shard.device: shard.data for part in parts for shard in part.addressable_shards}
        sharding = NamedSharding(self.mesh, spec)
        return jax.make_array_from_single_device_arrays(
            like.shape, sharding, [data[device] for device in self.mesh.devices.flat]
        )

    def _sum(self, trees: Mapping[int, Any], at: int | None = None) -> Any:
        """The sum of trees on several devices, on one of them."""
        device = next(iter(trees)) if at is None else at
        here = [self.moved(tree, device, source) for source, tree in trees.items()]
        if len(here) == 1:
            return here[0]
        with jax.set_mesh(self.meshes[device]):
            return _summed(here)

    def _local(self, leaf: jax.Array, device: int) -> jax.Array:
        """The part of an array on one device's mesh: a copy of it, or its rows where the first dim is split."""
        mesh, spec = self.meshes[device], partition_spec_of(leaf)
        data = {shard.device: shard.data for shard in leaf.addressable_shards}
        here = [data[each] for each in mesh.devices.flat]
        split = bool(spec) and spec[0] == self.axis
        shape = (leaf.shape[0] // len(self.meshes), *leaf.shape[1:]) if split else leaf.shape
        sharding = NamedSharding(mesh, P(None, *spec[1:]) if split else spec)
        return jax.make_array_from_single_device_arrays(shape, sharding, here)

    def _spec(self, leaf: Any, *, whole: bool = True) -> P:
        """How an array is split along the other axes; with `whole=False` along this one too."""
        spec = partition_spec_of(leaf) if getattr(getattr(leaf, "sharding", None), "mesh", None) == self.mesh else P()
        if not whole:
            return spec
        return P(*(_without(dim, self.axis) for dim in spec))


def _without(dim: Any, axis: str) -> Any:
    if isinstance(dim, tuple):
        return tuple(name for name in dim if name != axis) or None
    return None if dim == axis else dim


def _placed(leaf: Any, mesh: Mesh, spec: P) -> jax.Array:
    return jax.device_put(leaf, NamedSharding(mesh, spec))


@partial(jax.jit, static_argnums=1)
def _unstacked(tree: Any, num: int) -> list[Any]:
    return [jax.tree.map(lambda leaf, i=i: leaf[i], tree) for i in range(num)]


@partial(jax.jit, static_argnums=(1, 2))
def _rows(leaf: jax.Array, num: int, sharding: NamedSharding) -> list[jax.Array]:
    return [jax.lax.with_sharding_constraint(leaf[i : i + 1], sharding) for i in range(num)]


@partial(jax.jit, static_argnums=1)
def _stacked(rows: list[jax.Array], sharding: NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(jnp.concatenate(rows), sharding)


@jax.jit
def _summed(trees: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *trees)
