"""The mesh: named axes over devices, real or described.

``with sharding.mesh(data=2, tensor=4) as m:`` puts a mesh in force for the block. Over real devices ``m`` is a
``jax.sharding.Mesh`` with Auto axes; over described ones (``devices="v5p:4x8x8"``) an ``AbstractMesh``, on which
programs can be traced, completed and priced but not run. The first axis is the major one: consecutive devices differ
in the last.
"""

from __future__ import annotations

import heapq
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from sharding import compat, hardware
from sharding.errors import ShardingError, raise_together


class Device(Protocol):
    """What is used of a ``jax.Device``, which has no type that checkers can see."""

    @property
    def platform(self) -> str:
        """``"cpu"``, ``"gpu"`` or ``"tpu"``."""
        ...

    @property
    def process_index(self) -> int:
        """The process that the device belongs to."""
        ...


AxisSizes = Mapping[str, int]
"""Axis name to size, major axis first."""

DevicesLike = Sequence[Device] | hardware.Devices | str | int
"""Real devices; or a description of devices; or the number of devices of no particular kind."""


def mesh(axes: AxisSizes | None = None, /, *, devices: DevicesLike | None = None, **sizes: int) -> MeshContext:
    """A mesh to enter with ``with``; it can be entered any number of times, also within another.

    Args:
        axes: axis sizes as a mapping, for names that are not Python identifiers; they come before ``sizes``.
        devices: what the axes are over: real devices, in order (default: all of ``jax.devices()``); a text that
            describes devices, ``"v5p:4x8x8"`` (a TPU torus in chips) or ``"h100:16x8"`` (hosts x GPUs); or a number
            of devices of no particular kind.
        **sizes: the size of each axis, major axis first; one may be -1: what is left.

    Raises:
        ShardingError: the sizes don't multiply up to the number of devices, or one of them is no size.
    """
    request = _Request(sizes=_merged(axes or {}, sizes), devices=devices)
    _refuse_traced(request)
    _check_sizes(request)
    found = _found(request)
    resolved = _resolved(request, _count(found))
    if isinstance(found, int | hardware.Devices):
        over = AbstractMesh(tuple(resolved.values()), tuple(resolved), axis_types=_auto(resolved))
        return MeshContext(mesh=over, described=None if isinstance(found, int) else found)
    return MeshContext(mesh=_over(found, resolved))


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshContext:
    """A mesh that ``with`` puts in force."""

    mesh: Mesh | AbstractMesh
    described: hardware.Devices | None = None
    """The described devices that the mesh is over; None for real ones and for a mere number."""

    def __enter__(self) -> Mesh | AbstractMesh:
        _refuse_traced(_Request(sizes=dict(self.mesh.shape)))
        with ExitStack() as stack:
            if isinstance(self.mesh, Mesh):
                stack.enter_context(jax.set_mesh(self.mesh))
            else:
                # JAX refuses a mesh of another size inside a real one; leaving to the empty one first is allowed.
                stack.enter_context(jax.set_mesh(Mesh(np.empty((), object), ())))
                stack.enter_context(jax.sharding.use_abstract_mesh(self.mesh))
            _ENTERED.set((*_ENTERED.get(), (self, stack.pop_all())))
        return self.mesh

    def __exit__(self, *exc_info: object) -> None:
        *outer, (_, stack) = _ENTERED.get()
        _ENTERED.set(tuple(outer))
        stack.close()


_ENTERED: ContextVar[tuple[tuple[MeshContext, ExitStack], ...]] = ContextVar("sharding.mesh", default=())


def current() -> Mesh | AbstractMesh | None:
    """The mesh in force, or None: the one entered last, by ``sharding.mesh`` or by plain ``jax.set_mesh``.

    Inside traced code a mesh entered with ``sharding.mesh`` is still the one with its devices; of a mesh set by
    ``jax.set_mesh`` JAX shows only the ``AbstractMesh`` there.
    """
    ours = _innermost()
    of_jax = jax.sharding.get_abstract_mesh()
    if ours is not None and isinstance(ours.mesh, Mesh) and ours.mesh.abstract_mesh is of_jax:
        return ours.mesh  # as a rule; the rest costs every call of a program more than all else it asks
    if of_jax.empty or (ours is not None and ours.mesh.shape_tuple == of_jax.shape_tuple):
        return ours.mesh if ours else None
    concrete = None if compat.in_trace() else jax.sharding.get_mesh()
    return concrete if concrete is not None and concrete.shape_tuple == of_jax.shape_tuple else of_jax


def described() -> hardware.Devices | None:
    """The devices under the mesh in force where they are described by a text, otherwise None."""
    ours = _innermost()
    return ours.described if ours is not None and ours.mesh is current() else None


def topology(m: Mesh | AbstractMesh, *, devices: hardware.Devices | str | None = None) -> dict[str, hardware.Link]:
    """The link of each axis: the slowest one that joins devices which differ in that axis only.

    Args:
        m: the mesh. An ``AbstractMesh`` that is in force is over the devices that ``sharding.mesh`` was given.
        devices: the described devices under any other ``AbstractMesh``; without them its links are ``"unknown"``.
    """
    if isinstance(m, Mesh):
        link = _LINKS.get(m.devices.flat[0].platform, "unknown")
        return _links(m, np.vectorize(_island, otypes=[int])(m.devices), link)
    known = hardware.parse(devices) if isinstance(devices, str) else devices
    known = known or (described() if m == current() else None)
    if known is None:
        return dict.fromkeys(m.axis_names, "unknown")
    if known.num_devices != m.size:
        raise ShardingError(
            f"the topology of a mesh of {m.size} devices over {known}",
            there=f"{known} is {known.num_devices} devices",
            must="the mesh has as many devices as the description",
        )
    islands = np.arange(m.size) // known.devices_per_island
    return _links(m, islands.reshape(m.axis_sizes), known.chip.link)


_LINKS: dict[str, hardware.Link] = {"tpu": "ici", "gpu": "nvlink", "cpu": "shared memory"}


def _links(m: Mesh | AbstractMesh, islands: np.ndarray, within: hardware.Link) -> dict[str, hardware.Link]:
    crosses = {name: (islands != islands.take([0], axis=dim)).any() for dim, name in enumerate(m.axis_names)}
    return {name: "network" if crossed else within for name, crossed in crosses.items()}


def _island(device: Device) -> int:
    """Which island of fast links a device is on: its slice where the platform knows slices, else its process."""
    index = getattr(device, "slice_index", None)
    return device.process_index if index is None else index


def _innermost() -> MeshContext | None:
    entered = _ENTERED.get()
    return entered[-1][0] if entered else None


def _auto(sizes: AxisSizes) -> tuple[AxisType, ...]:
    return (AxisType.Auto,) * len(sizes)


def _over(devices: Sequence[Device], sizes: AxisSizes) -> Mesh:
    """A mesh over real devices, arranged by JAX to fit their links where it can."""
    names, shape = tuple(sizes), tuple(sizes.values())
    try:
        return jax.make_mesh(shape, names, axis_types=_auto(sizes), devices=devices)
    except (ValueError, NotImplementedError):
        # Several slices, or a torus that the shape does not fold into: in order, islands outermost.
        return Mesh(np.array(sorted(devices, key=_island)).reshape(shape), names, axis_types=_auto(sizes))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """What the caller of ``mesh`` wrote, to resolve and to quote in errors."""

    sizes: AxisSizes
    devices: DevicesLike | None = None

    def __str__(self) -> str:
        sizes = [f"{name}={size!r}" for name, size in self.sizes.items()]
        if not all(isinstance(name, str) and name.isidentifier() for name in self.sizes):
            sizes = [repr(dict(self.sizes))]
        return f"sharding.mesh({', '.join([*sizes, *self._devices()])})"

    def _devices(self) -> list[str]:
        if self.devices is None:
            return []
        if isinstance(self.devices, str | int):
            return [f"devices={self.devices!r}"]
        return [f'devices="{self.devices}"' if isinstance(self.devices, hardware.Devices) else "devices=..."]


def _merged(axes: AxisSizes, sizes: AxisSizes) -> dict[str, int]:
    if twice := axes.keys() & sizes.keys():
        raise ShardingError(f"sharding.mesh with the axis {sorted(twice)[0]!r} twice", must="each axis is given once")
    return {**axes, **sizes}


def _refuse_traced(request: _Request) -> None:
    if compat.in_trace():
        raise ShardingError(
            str(request),
            there="traced code: a function under jit, grad, vmap or scan",
            must="a mesh is entered outside of traced code",
            fix=f"put `with {request}:` around the call of the traced function",
        )


def _check_sizes(request: _Request) -> None:
    """Raises, all together, for every axis that has no usable name or size."""
    failures = [
        ShardingError(f"axis {name!r} of size {size!r}", must=must)
        for name, size in request.sizes.items()
        if (must := _broken_rule(name, size))
    ]
    free = [name for name, size in request.sizes.items() if size == -1]
    if len(free) > 1:
        failures.append(ShardingError(f"axes {', '.join(map(repr, free))} of size -1", must="at most one axis is -1"))
    if not request.sizes:
        failures.append(ShardingError(str(request), must="there is at least one axis", fix="sharding.mesh(data=-1)"))
    raise_together(str(request), failures)


def _broken_rule(name: object, size: object) -> str:
    """The rule that an axis breaks, or an empty text."""
    if not isinstance(name, str) or not name:
        return "an axis name is a text that is not empty"
    try:
        number = 0 if isinstance(size, bool) else operator.index(size)  # pyright: ignore[reportArgumentType] tested here
    except TypeError:
        number = 0
    return "" if number >= 1 or number == -1 else "a size is a whole number from 1 up, or -1 for what is left"


def _found(request: _Request) -> list[Device] | hardware.Devices | int:
    devices = request.devices
    if isinstance(devices, str):
        return hardware.parse(devices)
    found = (
        devices if isinstance(devices, int | hardware.Devices) else list(jax.devices() if devices is None else devices)
    )
    if _count(found) < 1:
        raise ShardingError(str(request), there="no devices", must="a mesh is over one device or more")
    return found


def _count(found: Sequence[Device] | hardware.Devices | int) -> int:
    if isinstance(found, int):
        return found
    return found.num_devices if isinstance(found, hardware.Devices) else len(found)


def _resolved(request: _Request, num_devices: int) -> dict[str, int]:
    """The sizes with -1 filled in; an error that offers the nearest sizes where they don't fit."""
    sizes = {name: operator.index(size) for name, size in request.sizes.items()}
    fixed = math.prod(size for size in sizes.values() if size != -1)
    free = -1 in sizes.values()
    if num_devices % fixed == 0 if free else fixed == num_devices:
        return {name: num_devices // fixed if size == -1 else size for name, size in sizes.items()}
    product = " x ".join(str(size) for size in sizes.values() if size != -1)
    raise ShardingError(
        str(request),
        there=f"{num_devices} devices, and {product} = {fixed}" if " x " in product else f"{num_devices} devices",
        must=f"the sizes other than -1 divide {num_devices}" if free else f"the sizes multiply up to {num_devices}",
        fix=[*_nearest(request, num_devices), *_other_devices(request, fixed, num_devices)],
    )


def _nearest(request: _Request, num_devices: int) -> list[str]:
    """Up to four calls with the same axes that fit the devices, the fewest doublings and halvings away first."""
    names, wanted = tuple(request.sizes), tuple(request.sizes.values())

    def distance(sizes: tuple[int, ...]) -> tuple[float, int]:
        steps = [abs(math.log2(new / old)) for new, old in zip(sizes, wanted, strict=True) if old != -1]
        return round(sum(steps), 6), sum(step > 0 for step in steps)

    divisors = [number for number in range(1, num_devices + 1) if num_devices % number == 0]
    fitting = heapq.nsmallest(4, _factorisations(num_devices, len(names), divisors), key=distance)
    kept = [tuple(-1 if old == -1 else new for new, old in zip(sizes, wanted, strict=True)) for sizes in fitting]
    return [str(_Request(sizes=dict(zip(names, sizes, strict=True)), devices=request.devices)) for sizes in kept]


def _factorisations(number: int, parts: int, divisors: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every way to write a number as a product of so many ordered factors, taken from ``divisors``."""
    if parts == 1:
        yield (number,)
        return
    for factor in (divisor for divisor in divisors if number % divisor == 0):
        yield from ((factor, *rest) for rest in _factorisations(number // factor, parts - 1, divisors))


def _other_devices(request: _Request, wanted: int, num_devices: int) -> list[str]:
    """The same sizes over other devices, where the caller left the devices to us."""
    if request.devices is not None or -1 in request.sizes.values():
        return []
    if wanted < num_devices:
        sizes = str(request).removesuffix(")")
        return [f"{sizes}, devices=jax.devices()[:{wanted}])"]
    enough = [f'jax.config.update("jax_num_cpu_devices", {wanted}) before the first use of JAX']
    described = str(_Request(sizes=request.sizes, devices=wanted))
    return [*(enough if jax.default_backend() == "cpu" else ()), f"{described}, to look at without running"]
