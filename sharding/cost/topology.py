"""Interconnect of the devices along a mesh axis: rings or lines of a torus, a switch, the network.

A group of devices, those that differ only in the given axes, is described as *levels*, innermost first: the devices of
one chip, of one torus or host, of several hosts. A level has one *way* for a switch and one per torus dim.

Mesh axes are assigned to torus dims as in `jax.make_mesh`: from the last axis to the first, each takes the most dims
whose product is its size. If that fails for some axis, devices are in row-major order, and an axis may get part of a
dim: the minor part is a line of neighbours, the major part one of devices several hops apart, whose links other groups
use at the same time.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from .. import hardware
from ..errors import ShardingError
from ..hardware import Chip, Devices, Link, Wire
from ..hardware.physical_mesh import island
from ..mesh import current, described
from ..spec import Axis, axis_name, num_parts

Shape = Literal["ring", "line", "switch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """The connection of a group's devices along one torus dim or through one switch."""

    shape: Shape
    """ring: closed and bidirectional; line: open; switch: all-to-all connected."""
    size: int
    """Devices along it."""
    bytes_per_second: float
    """Ring, line: to one neighbour, per direction. Switch: out of a device, to all others together."""
    latency_seconds: float
    """Per hop."""
    link: Link


Level = tuple[Way, ...]
"""Ways that one collective uses at the same time: the dims of a torus."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """A mesh and its assignment to devices."""

    sizes: tuple[tuple[str, int], ...]
    """The mesh axes, major axis first."""
    devices: Devices
    islands: tuple[int, ...] = ()
    """Host of each device in mesh order, or the slice of TPUs in several slices; empty on one torus."""
    _levels_cache: dict[tuple[Axis, ...], tuple[Level, ...]] = field(default_factory=dict, compare=False, repr=False)
    """Results of `levels`: a search asks for few axes many times."""

    @property
    def chip(self) -> Chip:
        """The chip of every device."""
        return self.devices.chip

    @property
    def folds(self) -> bool:
        """Whether each axis takes whole dims of the torus; otherwise axes share links.

        Several slices are not checked.
        """
        return not self.chip.torus_dims or bool(self.islands) or _full_dims(self.sizes, self.devices) is not None

    def group_size(self, axes: Sequence[Axis]) -> int:
        """Devices per group over these axes."""
        return num_parts(axes, dict(self.sizes))

    @property
    def links(self) -> dict[str, Link]:
        """The link of each axis: the slowest one between devices that differ only in that axis."""
        return {name: "network" if self._crosses(name) else self.chip.link for name, _ in self.sizes}

    def _crosses(self, axis: str) -> bool:
        islands = np.array(self.islands or (0,) * self.devices.num_devices)[_groups(self, (axis,))]
        return bool((islands != islands[:, :1]).any())

    def levels(self, axes: Sequence[Axis]) -> tuple[Level, ...]:
        """The interconnect of a group over these axes, innermost level first; empty for a group of one.

        Args:
            axes: mesh axes or sub-axes.

        Raises:
            ShardingError: if the mesh has no such axis.
        """
        key = tuple(axes)
        if key not in self._levels_cache:
            self._levels_cache[key] = _levels(self, key)
        return self._levels_cache[key]


def topology(m: Mesh | AbstractMesh, hardware_like: Devices | Chip | str | None = None) -> Topology:
    """The topology of a mesh on its devices: the links of each axis, and what they carry.

    Args:
        m: the mesh.
        hardware_like: the hardware to assume: a description such as ``"v5p:4x8x8"``, a chip's name, or the path of a
            calibration file (`hardware.arranged`). Default: the mesh's real devices, or the described ones it was
            created over, if it is the current mesh.

    Raises:
        ShardingError: if the hardware is unknown, or has another number of devices than the mesh.

    Example:
        >>> import sharding
        >>> with sharding.mesh(node=16, gpu=8, devices="h100:16x8") as mesh:
        ...     print(sharding.topology(mesh).links)
        {'node': 'network', 'gpu': 'nvlink'}
    """
    if hardware_like is None:
        found = _real(m) if isinstance(m, Mesh) else described() if m == current() else None
        if found is None:
            raise ShardingError(
                f"the topology of a mesh of {m.size} devices",
                found="devices of unknown hardware",
                required="a chip or a description of the devices",
                fix=['hardware="h100"', 'sharding.mesh(..., devices="v5p:4x8x8")', 'hardware="machine.json"'],
            )
    else:
        found = hardware.arranged(hardware_like, m.size)
    sizes = tuple((str(name), int(size)) for name, size in m.shape.items())
    islands = _slices(m) if found.chip.torus_dims else _islands(m, found)
    return Topology(sizes=sizes, devices=found, islands=islands)


def known_topology(m: Mesh | AbstractMesh) -> Topology | None:
    """The topology of a mesh on its own devices, or the described ones that it was created over; None if unknown."""
    try:
        return topology(m)
    except ShardingError:
        return None


def topology_of_sizes(
    sizes: Mapping[str, int], hardware_like: Devices | Chip | str | None, own: Devices | None
) -> Topology:
    """The topology of the current mesh if it has these axes, else of a mesh of these axes on its own devices."""
    mesh = current()
    if mesh is None or dict(mesh.shape) != dict(sizes):
        return topology(AbstractMesh(tuple(sizes.values()), tuple(sizes)), hardware_like or own)
    return topology(mesh, hardware_like)


def byte_costs(on: Topology | None) -> dict[str, float]:
    """Axis -> the time of a byte over the network, relative to the links inside of hosts or slices.

    By data sheet alone, so that all processes find the same. Empty if all axes have the same kind of link, and for
    CPUs and unknown devices.
    """
    if on is None or on.chip.platform == "cpu":
        return {}
    slow = [axis for axis, size in on.sizes if on.links[axis] == "network" and size > 1]
    if all(axis in slow for axis, size in on.sizes if size > 1):
        return {}
    ratio = on.chip.wire.total_bytes_per_second / on.chip.network.total_bytes_per_second
    return dict.fromkeys(slow, max(1.0, ratio))


def _real(m: Mesh) -> Devices | None:
    """The hardware of a mesh's real devices, equally many per host; None if the chip is not recognised."""
    device: Any = m.devices.flat[0]
    known = hardware.recognised(device.platform, device.device_kind)
    if known is None:
        return None
    if known.torus_dims:
        coords = np.array([one.coords for one in m.devices.flat])[:, : known.torus_dims]
        extent = coords.max(axis=0) - coords.min(axis=0) + 1
        shape = tuple(int(size) for size in extent)
        if math.prod(shape) * known.devices_per_chip == m.size:
            return Devices(chip=known, shape=shape)
        return hardware.arranged(known, m.size)  # several slices, or part of one: treated as a slice of their own
    num_hosts = len(set(_processes(m)))
    per_host = m.size // num_hosts
    return Devices(chip=known.on_cores(os.cpu_count() or 1, per_host), shape=(num_hosts, per_host))


def _processes(m: Mesh) -> list[int]:
    return [device.process_index for device in m.devices.flat]


def _slices(m: Mesh | AbstractMesh) -> tuple[int, ...]:
    """The slice of each real device of a mesh over several slices of TPUs; empty otherwise."""
    found = (
        [island(device) for device in m.devices.flat if hasattr(device, "slice_index")] if isinstance(m, Mesh) else []
    )
    return tuple(found) if len(set(found)) > 1 else ()


def _islands(m: Mesh | AbstractMesh, devices: Devices) -> tuple[int, ...]:
    if isinstance(m, Mesh) and len(set(_processes(m))) == devices.num_hosts:
        return tuple(_processes(m))
    return tuple(number // devices.devices_per_island for number in range(m.size))


def _levels(on: Topology, axes: tuple[Axis, ...]) -> tuple[Level, ...]:
    unknown = [axis_name(axis) for axis in axes if _name(axis) not in dict(on.sizes)]
    if unknown:
        raise ShardingError(
            f"the links along {', '.join(unknown)}",
            found=f"a mesh with axes {', '.join(name for name, _ in on.sizes)}",
            required="axes of the mesh",
        )
    levels = _torus_levels(on, axes) if on.chip.torus_dims else _switch_levels(on, axes)
    return tuple(level for level in levels if level)


def _name(axis: Axis) -> str:
    return axis if isinstance(axis, str) else axis[0]


def _switch_levels(on: Topology, axes: tuple[Axis, ...]) -> list[Level]:
    """A switch within each host, and the network between hosts, with one network link per device.

    If groups are distributed over hosts differently, or a group unevenly, all traffic is taken to use the network.
    """
    groups = np.array(on.islands)[_groups(on, axes)]
    counts = {tuple(sorted(np.unique(group, return_counts=True)[1].tolist())) for group in groups}
    size, chip = groups.shape[1], on.chip
    inside = next(iter(counts))[0] if len(counts) == 1 and len(set(next(iter(counts)))) == 1 else 1
    return [_switch(inside, chip.wire, chip.link), _switch(size // inside, chip.network, "network")]


def _switch(size: int, wire: Wire, link: Link) -> Level:
    if size == 1:
        return ()
    rate = wire.total_bytes_per_second
    way = Way(shape="switch", size=size, bytes_per_second=rate, latency_seconds=wire.latency_seconds, link=link)
    return (way,)


def _groups(on: Topology, axes: tuple[Axis, ...]) -> np.ndarray:
    """Indices of the devices in the mesh, one row per group."""
    sizes = dict(on.sizes)
    dims = [(name, 1, size) for name, size in on.sizes]
    for name, pre, size in (axis for axis in axes if not isinstance(axis, str)):
        index = next(i for i, dim in enumerate(dims) if dim[0] == name and dim[1] <= pre < dim[1] * dim[2])
        _, before, full_size = dims[index]
        rest = full_size * before // (pre * size)
        dims[index : index + 1] = [(name, before, pre // before), (name, pre, size), (name, pre * size, rest)]
    grouped = [
        i
        for i, dim in enumerate(dims)
        if dim[0] in axes or any(dim == axis for axis in axes if not isinstance(axis, str))
    ]
    indices = np.arange(math.prod(sizes.values())).reshape([size for _, _, size in dims])
    size = math.prod(dims[i][2] for i in grouped)
    return np.moveaxis(indices, grouped, range(-len(grouped), 0)).reshape(-1, size)


@dataclass(frozen=True, slots=True)
class _Subdim:
    """Part of a torus dim: `size` devices, `hops` apart. Dim -1 is the devices of a chip."""

    dim: int
    size: int
    hops: int


def _torus_levels(on: Topology, axes: tuple[Axis, ...]) -> list[Level]:
    assigned = _assigned_dims(on.sizes, on.devices)
    subdims = [subdim for axis in axes for subdim in _subdims(assigned[_name(axis)], axis)]
    subdims = _merge_adjacent(subdims, dict(_dims(on.devices)))
    cores = math.prod(subdim.size for subdim in subdims if subdim.dim == -1)
    core_wire = on.chip.core_wire or on.chip.wire
    chips = tuple(_way(subdim, on.devices) for subdim in subdims if subdim.dim >= 0)
    by_dim = [subdim.dim for subdim in subdims if subdim.dim >= 0]
    between = [chips] if len(set(by_dim)) == len(by_dim) else [(way,) for way in chips]
    return [_switch(cores, core_wire, "ici"), *between]


def _way(subdim: _Subdim, devices: Devices) -> Way:
    """The way along part of a dim; interleaved groups share its links."""
    extent, wire = devices.shape[subdim.dim], devices.chip.wire
    closed = devices.wraps[subdim.dim] and subdim.size * subdim.hops == extent and subdim.size > 2
    return Way(
        shape="ring" if closed else "line",
        size=subdim.size,
        bytes_per_second=wire.bytes_per_second / subdim.hops,
        latency_seconds=wire.latency_seconds * subdim.hops,
        link=devices.chip.link,
    )


def _subdims(subdims: Sequence[_Subdim], axis: Axis) -> list[_Subdim]:
    """The sub-dims of an axis or sub-axis."""
    if isinstance(axis, str):
        return list(subdims)
    _, pre, size = axis
    found = []
    for subdim in subdims:
        before = math.gcd(pre, subdim.size)
        taken = math.gcd(size, subdim.size // before)
        after = subdim.size // (before * taken)
        pre, size = pre // before, size // taken
        if taken > 1:
            found.append(_Subdim(subdim.dim, taken, subdim.hops * after))
    return found


def _merge_adjacent(subdims: Sequence[_Subdim], extents: Mapping[int, int]) -> list[_Subdim]:
    """Sub-dims with adjacent ones of the same dim merged."""
    merged: list[_Subdim] = []
    for subdim in sorted(subdims, key=lambda subdim: (subdim.dim, subdim.hops)):
        last = merged[-1] if merged else None
        follows = last is not None and last.dim == subdim.dim and last.hops * last.size == subdim.hops
        if last is not None and follows and subdim.hops * subdim.size <= extents[subdim.dim]:
            merged[-1] = _Subdim(last.dim, last.size * subdim.size, last.hops)
        else:
            merged.append(subdim)
    return merged


def _assigned_dims(sizes: tuple[tuple[str, int], ...], devices: Devices) -> dict[str, tuple[_Subdim, ...]]:
    """Axis -> its sub-dims of the torus, major to minor."""
    return _full_dims(sizes, devices) or _in_order(sizes, devices)


def _dims(devices: Devices) -> list[tuple[int, int]]:
    """The torus dims, then the devices of a chip, each with its size."""
    return [*enumerate(devices.shape), (-1, devices.chip.devices_per_chip)]


def _full_dims(sizes: tuple[tuple[str, int], ...], devices: Devices) -> dict[str, tuple[_Subdim, ...]] | None:
    """Each axis on full dims, as `jax.make_mesh` assigns them; None if some axis has no match."""
    left = {dim: size for dim, size in sorted(_dims(devices)) if size > 1}  # the devices of a chip first
    assigned: dict[str, tuple[_Subdim, ...]] = {name: () for name, _ in sizes}
    for name, size in reversed([one for one in sizes if one[1] > 1]):
        choices = (dims for count in range(len(left), 0, -1) for dims in itertools.combinations(left, count))
        dims = next((dims for dims in choices if math.prod(left[dim] for dim in dims) == size), None)
        if dims is None:
            return None
        assigned[name] = tuple(_Subdim(dim, left.pop(dim), 1) for dim in dims)
    return assigned


def _in_order(sizes: tuple[tuple[str, int], ...], devices: Devices) -> dict[str, tuple[_Subdim, ...]]:
    """Axes on devices in row-major order, the last axis and the last dim minor.

    An axis whose size has no common factor with the rest of a dim is taken to be a line over that dim with all of its
    hops: a pessimistic approximation.
    """
    dims = [[dim, size, 1] for dim, size in _dims(devices) if size > 1]
    assigned: dict[str, tuple[_Subdim, ...]] = {}
    for name, size in reversed(sizes):
        subdims: list[_Subdim] = []
        while size > 1:
            dim, left, hops = dims[-1]
            taken = math.gcd(size, left)
            if taken == 1:
                subdims.insert(0, _Subdim(dim, size, hops))
                dims = _without(dims, size)
                break
            subdims.insert(0, _Subdim(dim, taken, hops))
            size //= taken
            dims = dims[:-1] if taken == left else [*dims[:-1], [dim, left // taken, hops * taken]]
        assigned[name] = tuple(subdims)
    return assigned


def _without(dims: list[list[int]], size: int) -> list[list[int]]:
    """The rest of the dims for other axes after one of this size is taken out of them."""
    left = []
    for dim, extent, hops in dims:
        common = math.gcd(extent, size)
        size //= common
        if extent // common > 1:
            left.append([dim, extent // common, hops])
    return left
