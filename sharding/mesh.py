"""The mesh: named axes over devices, real or described.

``with sharding.mesh(data=2, tensor=4) as m:`` sets the current mesh for the block. Over real devices ``m`` is a
``jax.sharding.Mesh`` with Auto axes; over described ones (``devices="v5p:4x8x8"``) an ``AbstractMesh``, on which
programs can be traced, completed and estimated but not run. The first axis is major: consecutive devices differ in the
last.
"""

from __future__ import annotations

import heapq
import math
import operator
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, cast

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from sharding import compat, hardware
from sharding.errors import ShardingError, raise_together
from sharding.hardware.physical_mesh import device_array


class Device(Protocol):
    """The part of ``jax.Device`` used here; it has no public type for checkers."""

    @property
    def platform(self) -> str:
        """``"cpu"``, ``"gpu"`` or ``"tpu"``."""
        ...

    @property
    def process_index(self) -> int:
        """The index of the process that owns the device."""
        ...


AxisSizes = Mapping[str, int]
"""Axis name to size, major axis first."""

DevicesLike = Sequence[Device] | hardware.Devices | str | int
"""Real devices, described devices, or a number of unspecified devices."""


def mesh(axes: AxisSizes | None = None, /, *, devices: DevicesLike | None = None, **sizes: int) -> MeshContext:
    """A context manager that sets the current mesh; it is reusable and can be nested.

    Args:
        axes: axis sizes as a mapping, for names that are not Python identifiers; they precede ``sizes``.
        devices: real devices in order (default: ``jax.devices()``); a description of devices, ``"v5p:4x8x8"`` (a TPU
            torus in chips) or ``"h100:16x8"`` (hosts x GPUs); or a number of unspecified devices.
        **sizes: the size of each axis, major axis first; one may be -1 to be inferred.

    Raises:
        ShardingError: the product of the axis sizes is not the number of devices, or a size is invalid.

    Example:
        >>> import sharding
        >>> with sharding.mesh(data=-1, tensor=4) as mesh:
        ...     print(dict(mesh.shape))
        {'data': 2, 'tensor': 4}
        >>> with sharding.mesh(data=64, tensor=8, devices="v5p:8x8x8") as mesh:
        ...     print(mesh.size)
        512
    """
    request = _Request(sizes=_merged(axes or {}, sizes), devices=devices)
    _refuse_traced(request)
    _check_sizes(request)
    found = _found(request)
    resolved = _resolved(request, _count(found))
    auto = (AxisType.Auto,) * len(resolved)
    if isinstance(found, int | hardware.Devices):
        over = AbstractMesh(tuple(resolved.values()), tuple(resolved), axis_types=auto)
        return MeshContext(mesh=over, described=None if isinstance(found, int) else found)
    order = device_array(found, resolved, asked=str(request))
    return MeshContext(mesh=Mesh(order, tuple(resolved), axis_types=auto))


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshContext:
    """A context manager that makes ``mesh`` the current mesh."""

    mesh: Mesh | AbstractMesh
    described: hardware.Devices | None = None
    """The described devices of the mesh; None for real ones and for a plain number."""

    def __enter__(self) -> Mesh | AbstractMesh:
        _refuse_traced(_Request(sizes=dict(self.mesh.shape)))
        entry = _Entry(context=self, stack=_as_jax_mesh(self.mesh))
        _ENTERED.set((*_ENTERED.get(), entry))
        _THREAD.entries.append(entry)
        return self.mesh

    def __exit__(self, *exc_info: object) -> None:
        *outer, entry = _ENTERED.get()
        _ENTERED.set(tuple(outer))
        here = _THREAD.entries
        at = here.index(entry) if entry in here else len(here) - 1
        if at + 1 < len(here):  # JAX has the mesh of another asyncio task, which is to restore what was before both
            here[at + 1].stack, entry.stack = entry.stack, ExitStack()
        here.remove(entry)
        entry.stack.close()


@dataclass(slots=True, eq=False)
class _Entry:
    """A context that was entered, and what restores JAX's mesh."""

    context: MeshContext
    stack: ExitStack


class _Thread(threading.local):
    """The entered contexts of all asyncio tasks of a thread, which share JAX's mesh."""

    def __init__(self) -> None:
        self.entries: list[_Entry] = []


_ENTERED: ContextVar[tuple[_Entry, ...]] = ContextVar("sharding.mesh", default=())
_THREAD = _Thread()


def current() -> Mesh | AbstractMesh | None:
    """The current mesh, or None: the innermost one of ``sharding.mesh`` or ``jax.set_mesh``, or of ``with Mesh(...)``.

    In traced code a mesh entered with ``sharding.mesh`` is still returned with its devices; for one set by
    ``jax.set_mesh`` JAX exposes only the ``AbstractMesh`` there.
    """
    ours = _innermost()
    of_jax = jax.sharding.get_abstract_mesh()
    if ours is not None and isinstance(ours.mesh, Mesh) and ours.mesh.abstract_mesh is of_jax:
        return ours.mesh  # the common case; the code below costs more per dispatch than all other checks
    is_ours = ours is not None and ours.mesh.shape_tuple == of_jax.shape_tuple
    if of_jax.empty or is_ours or _is_of_another_task(of_jax):
        return ours.mesh if ours else compat.mesh_of_with_statement()
    concrete = None if compat.in_trace() else jax.sharding.get_mesh()
    return concrete if concrete is not None and concrete.shape_tuple == of_jax.shape_tuple else of_jax


def _is_of_another_task(of_jax: AbstractMesh) -> bool:
    """Whether JAX's mesh is that of a context which another asyncio task of this thread entered."""
    here = _THREAD.entries
    return bool(here) and here[-1] not in _ENTERED.get() and of_jax == abstract(here[-1].context.mesh)


def described() -> hardware.Devices | None:
    """The described devices of the current mesh, or None."""
    ours = _innermost()
    return ours.described if ours is not None and ours.mesh is current() else None


def platform(m: Mesh | AbstractMesh | None = None) -> hardware.Platform:
    """The platform of a mesh's devices, real or described; by default of the current mesh, else JAX's own."""
    m = m or current()
    known = described()
    if isinstance(m, Mesh):
        return m.devices.flat[0].platform
    return cast("hardware.Platform", jax.default_backend()) if known is None else known.chip.platform


def with_auto_axes(m: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
    """The mesh with Auto instead of Explicit axes; itself if it has none."""
    if AxisType.Explicit not in m.axis_types:
        return m
    types = tuple(AxisType.Auto if kind is AxisType.Explicit else kind for kind in m.axis_types)
    if isinstance(m, Mesh):
        return Mesh(m.devices, m.axis_names, axis_types=types)
    return m.update(axis_types=types)


def abstract(m: Mesh | AbstractMesh) -> AbstractMesh:
    """The mesh without its devices."""
    return m.abstract_mesh if isinstance(m, Mesh) else m


@contextmanager
def in_force(m: Mesh | AbstractMesh) -> Iterator[None]:
    """The context in which `m`, the current mesh, is also JAX's."""
    with ExitStack() as stack:
        of_jax = jax.sharding.get_abstract_mesh()
        if of_jax != abstract(m) and not compat.in_trace():
            stack.enter_context(_as_jax_mesh(m))
        elif of_jax.empty:
            stack.enter_context(jax.sharding.use_abstract_mesh(abstract(m)))
        yield


@contextmanager
def tracing_context() -> Iterator[None]:
    """The context to trace in, with Auto axes: eager ops of the function can't run on compile-only devices."""
    m = current()
    with ExitStack() as stack:
        if isinstance(m, Mesh) and compat.is_compile_only(m.devices.flat[0]) and not compat.in_trace():
            stack.enter_context(_as_jax_mesh(m.abstract_mesh))
        if m is not None and AxisType.Explicit in m.axis_types:
            stack.enter_context(jax.sharding.use_abstract_mesh(abstract(with_auto_axes(m))))
        yield


def without_mesh() -> AbstractContextManager[Any]:
    """The context without a mesh of JAX's, for programs over other devices."""
    return jax.set_mesh(Mesh(np.empty((), object), ()))


def _as_jax_mesh(m: Mesh | AbstractMesh) -> ExitStack:
    """Sets JAX's mesh; closing the stack restores it."""
    with ExitStack() as stack:
        if isinstance(m, Mesh):
            stack.enter_context(jax.set_mesh(m))
        else:  # JAX rejects a mesh of another size inside a real one, but allows it inside the empty mesh
            stack.enter_context(without_mesh())
            stack.enter_context(jax.sharding.use_abstract_mesh(m))
        return stack.pop_all()


def _innermost() -> MeshContext | None:
    entered = _ENTERED.get()
    return entered[-1].context if entered else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """The arguments of ``mesh``, to be resolved and quoted in errors."""

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
        raise ShardingError(f"sharding.mesh with the axis {sorted(twice)[0]!r} twice", required="distinct axis names")
    return {**axes, **sizes}


def _refuse_traced(request: _Request) -> None:
    if compat.in_trace():
        raise ShardingError(
            str(request),
            found="traced code: a function under jit, grad, vmap or scan",
            required="a mesh context outside of traced code",
            fix=f"put `with {request}:` around the call of the traced function",
        )


def _check_sizes(request: _Request) -> None:
    """Raises one error for all axes with an invalid name or size."""
    failures = [
        ShardingError(f"axis {name!r} of size {size!r}", required=required)
        for name, size in request.sizes.items()
        if (required := _violated_requirement(name, size))
    ]
    free = [name for name, size in request.sizes.items() if size == -1]
    if len(free) > 1:
        failures.append(
            ShardingError(f"axes {', '.join(map(repr, free))} of size -1", required="at most one size of -1")
        )
    if not request.sizes:
        failures.append(ShardingError(str(request), required="at least one axis", fix="sharding.mesh(data=-1)"))
    raise_together(str(request), failures)


def _violated_requirement(name: object, size: object) -> str:
    """The requirement that an axis violates, or an empty text."""
    if not isinstance(name, str) or not name:
        return "a non-empty string as axis name"
    try:
        number = 0 if isinstance(size, bool) else operator.index(size)  # pyright: ignore[reportArgumentType] tested here
    except TypeError:
        number = 0
    return "" if number >= 1 or number == -1 else "a positive integer as size, or -1 to infer it"


def _found(request: _Request) -> list[Device] | hardware.Devices | int:
    devices = request.devices
    if isinstance(devices, str):
        return hardware.parse(devices)
    found = (
        devices if isinstance(devices, int | hardware.Devices) else list(jax.devices() if devices is None else devices)
    )
    if _count(found) < 1:
        raise ShardingError(str(request), found="no devices", required="at least one device")
    return found


def _count(found: Sequence[Device] | hardware.Devices | int) -> int:
    if isinstance(found, int):
        return found
    return found.num_devices if isinstance(found, hardware.Devices) else len(found)


def _resolved(request: _Request, num_devices: int) -> dict[str, int]:
    """The sizes with -1 resolved. If they don't fit, raises an error that suggests the nearest sizes that do."""
    sizes = {name: operator.index(size) for name, size in request.sizes.items()}
    fixed = math.prod(size for size in sizes.values() if size != -1)
    free = -1 in sizes.values()
    if num_devices % fixed == 0 if free else fixed == num_devices:
        return {name: num_devices // fixed if size == -1 else size for name, size in sizes.items()}
    product = " x ".join(str(size) for size in sizes.values() if size != -1)
    raise ShardingError(
        str(request),
        found=f"{num_devices} devices, and {product} = {fixed}" if " x " in product else f"{num_devices} devices",
        required=f"a product that divides {num_devices}" if free else f"a product of {num_devices}",
        fix=[*_nearest(request, num_devices), *_other_devices(request, fixed, num_devices)],
    )


def _nearest(request: _Request, num_devices: int) -> list[str]:
    """Up to four calls with the same axes that fit the devices, nearest first in doublings and halvings."""
    names, requested = tuple(request.sizes), tuple(request.sizes.values())

    def distance(sizes: tuple[int, ...]) -> tuple[float, int]:
        steps = [abs(math.log2(new / old)) for new, old in zip(sizes, requested, strict=True) if old != -1]
        return round(sum(steps), 6), sum(step > 0 for step in steps)

    divisors = [number for number in range(1, num_devices + 1) if num_devices % number == 0]
    fitting = heapq.nsmallest(4, _factorisations(num_devices, len(names), divisors), key=distance)
    kept = [tuple(-1 if old == -1 else new for new, old in zip(sizes, requested, strict=True)) for sizes in fitting]
    return [str(_Request(sizes=dict(zip(names, sizes, strict=True)), devices=request.devices)) for sizes in kept]


def _factorisations(number: int, parts: int, divisors: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All ordered factorisations of a number into ``parts`` factors from ``divisors``."""
    if parts == 1:
        yield (number,)
        return
    for factor in (divisor for divisor in divisors if number % divisor == 0):
        yield from ((factor, *rest) for rest in _factorisations(number // factor, parts - 1, divisors))


def _other_devices(request: _Request, required: int, num_devices: int) -> list[str]:
    """The same sizes over other devices, if the caller did not choose the devices."""
    if request.devices is not None or -1 in request.sizes.values():
        return []
    if required < num_devices:
        sizes = str(request).removesuffix(")")
        return [f"{sizes}, devices=jax.devices()[:{required}])"]
    enough = [f'jax.config.update("jax_num_cpu_devices", {required}) before the first use of JAX']
    described = str(_Request(sizes=request.sizes, devices=required))
    return [*(enough if jax.default_backend() == "cpu" else ()), f"{described}, to inspect without running"]
