"""Transfers between the global mesh and the submeshes of the pipeline's stages.

Arrays whose shards are already on a submesh are reused there without a copy.
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
from .pipelined_model import Ends

Slices = Sequence[Any]
"""A pytree with leaves [microbatches, ...] per slice of the tokens; a single one without slices."""
DeviceStage = tuple[int, int]
"""(device on the pipeline axis, stage)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StageMeshes:
    """The submesh of each position on the pipeline axis, and the placement of the stages' parameters."""

    mesh: Mesh
    axis: str
    schedule: Schedule
    rows: tuple[int, ...]
    """The stage of each row of the stages' parameters; several rows may be copies of one stage."""

    @cached_property
    def meshes(self) -> tuple[Mesh, ...]:
        """Per position on the pipeline axis, the mesh of the other axes."""
        names = [name for name in self.mesh.axis_names if name != self.axis]
        types = [t for name, t in zip(self.mesh.axis_names, self.mesh.axis_types, strict=True) if name != self.axis]
        devices = np.moveaxis(self.mesh.devices, self.mesh.axis_names.index(self.axis), 0)
        return tuple(Mesh(each, tuple(names), axis_types=tuple(types)) for each in devices)

    @cached_property
    def unit_devices(self) -> dict[tuple[int, int], int]:
        """(stage, microbatch or slice) -> device."""
        return {(t.stage, self.schedule.unit(t)): d for d, order in enumerate(self.schedule.orders) for t in order}

    def device_of(self, stage: int, unit: int) -> int:
        """The device that runs a microbatch or slice at a stage."""
        return self.unit_devices[stage, unit]

    @property
    def placements(self) -> list[DeviceStage]:
        """All pairs of a device and one of its stages."""
        return [(device, stage) for device, own in enumerate(self.schedule.placement) for stage in own]

    def devices_of(self, stage: int) -> tuple[int, ...]:
        """The devices that run a stage."""
        return tuple(device for device, own in enumerate(self.schedule.placement) if stage in own)

    def stage_params(self, tree: Any) -> dict[DeviceStage, Any]:
        """The parameters of each stage on each of its devices, with a leading dim of 1."""
        leaves, tree_def = jax.tree.flatten(tree)
        cut = [self._rows(leaf) for leaf in leaves]
        found = {}
        for device, stage in self.placements:
            source = self._source_row(stage, device)
            rows = [self.transfer(rows[source], device, source // self._rows_per_device) for rows in cut]
            found[device, stage] = jax.tree.unflatten(tree_def, rows)
        return found

    def stage_shardings(self, tree: Any) -> list[Any]:
        """Per device, the shardings of one stage's parameters."""
        return [
            jax.tree.map(lambda leaf, mesh=mesh: NamedSharding(mesh, P(None, *self._spec(leaf)[1:])), tree)
            for mesh in self.meshes
        ]

    def stack_stages(self, sums: Mapping[DeviceStage, Any], like: Any) -> Any:
        """Stacks gradients of all stages with the shardings of `like`, summing the copies of a stage."""
        leaves, tree_def = jax.tree.flatten(like)
        flat = {at: jax.tree.leaves(tree) for at, tree in sums.items()}
        return jax.tree.unflatten(tree_def, [self._stack_leaf(flat, i, leaf) for i, leaf in enumerate(leaves)])

    def unstack(self, tree: Any) -> list[Any]:
        """[positions on the axis, ...] as one tree per position, on its submesh."""
        leaves, tree_def = jax.tree.flatten(tree)
        cut = [self._rows(leaf) for leaf in leaves]
        found = []
        for device, mesh in enumerate(self.meshes):
            with jax.set_mesh(mesh):
                found += _unstacked(jax.tree.unflatten(tree_def, [rows[device] for rows in cut]), 1)
        return found

    def local_replica(self, tree: Any, device: int) -> Any:
        """The copy on one device of arrays that are replicated over the axis."""
        return jax.tree.map(lambda leaf: self._local_part(_device_put(leaf, self.mesh, self._spec(leaf)), device), tree)

    def units(self, slices: Slices, device: int) -> list[Any]:
        """A device's microbatches as a list, with the slices of each adjacent."""
        with jax.set_mesh(self.meshes[device]):
            cut = [_unstacked(self.local_replica(tree, device), self.schedule.microbatches) for tree in slices]
        return [unit for microbatch in zip(*cut, strict=True) for unit in microbatch]

    def zero(self, device: int) -> jax.Array:
        """A scalar 0 on a device."""
        return jax.device_put(np.zeros((), np.float32), NamedSharding(self.meshes[device], P()))

    def transfer(self, tree: Any, device: int, source: int) -> Any:
        """Transfers arrays from device `source` to another, with the same specs."""
        return tree if device == source else self.put(tree, device)

    def put(self, tree: Any, device: int) -> Any:
        """Transfers arrays from any mesh to a device, with the same specs."""
        mesh = self.meshes[device]
        return jax.device_put(tree, jax.tree.map(lambda leaf: NamedSharding(mesh, partition_spec_of(leaf)), tree))

    def total_loss(self, losses: Mapping[int, jax.Array]) -> jax.Array:
        """The sum over devices, on the global mesh."""
        return jax.device_put(self._sum_over_devices(losses), NamedSharding(self.mesh, P()))

    def sum_ends(self, sums: Mapping[int, Ends], like: Ends) -> Ends:
        """Sums over devices, with the shardings of `like`."""
        return self.put_global(self._sum_over_devices(sums), like)

    def put_global(self, tree: Any, like: Any) -> Any:
        """Transfers arrays to the global mesh, with the shardings of `like`."""
        return jax.tree.map(
            lambda leaf, found: jax.device_put(found, NamedSharding(self.mesh, self._spec(leaf, drop_axis=False))),
            like,
            tree,
        )

    @property
    def _rows_per_device(self) -> int:
        return len(self.rows) // len(self.meshes)

    def _source_row(self, stage: int, device: int) -> int:
        """The row with a stage's parameters, preferably one on this device."""
        found = [row for row, each in enumerate(self.rows) if each == stage]
        own = [row for row in found if row // self._rows_per_device == device]
        return (own or found)[0]

    def _rows(self, leaf: jax.Array) -> list[jax.Array]:
        """[rows, ...] as rows [1, ...], each on its device."""
        placed = _device_put(leaf, self.mesh, P(self.axis, *self._spec(leaf)[1:]))
        local = [self._local_part(placed, device) for device in range(len(self.meshes))]
        if self._rows_per_device == 1:
            return local
        rows = []
        for mesh, part in zip(self.meshes, local, strict=True):
            with jax.set_mesh(mesh):
                rows += _rows(part, self._rows_per_device, part.sharding)
        return rows

    def _stack_leaf(self, sums: Mapping[DeviceStage, Sequence[jax.Array]], i: int, like: jax.Array) -> jax.Array:
        device_parts = []
        for home, mesh in enumerate(self.meshes):
            own = []
            for stage in self.rows[home * self._rows_per_device :][: self._rows_per_device]:
                copies = {device: sums[device, stage][i] for device in self.devices_of(stage)}
                own.append(self._sum_over_devices(copies, home))
            with jax.set_mesh(mesh):
                device_parts.append(own[0] if len(own) == 1 else _concatenate(own, own[0].sharding))
        spec = P(self.axis, *self._spec(like)[1:])
        data = {shard.device: shard.data for part in device_parts for shard in part.addressable_shards}
        sharding = NamedSharding(self.mesh, spec)
        return jax.make_array_from_single_device_arrays(
            like.shape, sharding, [data[device] for device in self.mesh.devices.flat]
        )

    def _sum_over_devices(self, trees: Mapping[int, Any], at: int | None = None) -> Any:
        """The sum of trees on several devices, on one of them."""
        device = next(iter(trees)) if at is None else at
        here = [self.transfer(tree, device, source) for source, tree in trees.items()]
        if len(here) == 1:
            return here[0]
        with jax.set_mesh(self.meshes[device]):
            return _sum_trees(here)

    def _local_part(self, leaf: jax.Array, device: int) -> jax.Array:
        """An array's part on one submesh: a copy, or its rows if the first dim is sharded over the axis."""
        mesh, spec = self.meshes[device], partition_spec_of(leaf)
        data = {shard.device: shard.data for shard in leaf.addressable_shards}
        here = [data[each] for each in mesh.devices.flat]
        is_sharded = bool(spec) and spec[0] == self.axis
        shape = (leaf.shape[0] // len(self.meshes), *leaf.shape[1:]) if is_sharded else leaf.shape
        sharding = NamedSharding(mesh, P(None, *spec[1:]) if is_sharded else spec)
        return jax.make_array_from_single_device_arrays(shape, sharding, here)

    def _spec(self, leaf: Any, *, drop_axis: bool = True) -> P:
        """An array's spec without the pipeline axis, or with it for `drop_axis=False`."""
        spec = partition_spec_of(leaf) if getattr(getattr(leaf, "sharding", None), "mesh", None) == self.mesh else P()
        if not drop_axis:
            return spec
        return P(*(_without_axis(dim, self.axis) for dim in spec))


def _without_axis(dim: Any, axis: str) -> Any:
    if isinstance(dim, tuple):
        return tuple(name for name in dim if name != axis) or None
    return None if dim == axis else dim


def _device_put(leaf: Any, mesh: Mesh, spec: P) -> jax.Array:
    return jax.device_put(leaf, NamedSharding(mesh, spec))


@partial(jax.jit, static_argnums=1)
def _unstacked(tree: Any, num: int) -> list[Any]:
    return [jax.tree.map(lambda leaf, i=i: leaf[i], tree) for i in range(num)]


@partial(jax.jit, static_argnums=(1, 2))
def _rows(leaf: jax.Array, num: int, sharding: NamedSharding) -> list[jax.Array]:
    return [jax.lax.with_sharding_constraint(leaf[i : i + 1], sharding) for i in range(num)]


@partial(jax.jit, static_argnums=1)
def _concatenate(rows: list[jax.Array], sharding: NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(jnp.concatenate(rows), sharding)


@jax.jit
def _sum_trees(trees: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *trees)
