"""`Spec`, the sharding of one array: for each dim the mesh axes it is sharded over, major to minor.

Beyond a `PartitionSpec`, a dim can be *open* (propagation may add axes) and has a *priority* (0 is propagated first),
an axis can be a sub-axis `(name, pre, size)` of a mesh axis (view the axis of size n as `[pre, size, n / (pre * size)]`
and take the middle), and axes can be *unreduced* (a pending sum).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.export import is_symbolic_dim
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from .errors import ShardingError

Axis = str | tuple[str, int, int]
"""A mesh axis, or a sub-axis: (name, pre, size)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dim:
    """The sharding of one dim."""

    axes: tuple[Axis, ...] = ()
    """Mesh axes, major to minor."""
    open: bool = False
    """Whether propagation may add minor axes."""
    priority: int = 0
    """0 is propagated first, higher numbers later."""
    is_stored: bool = field(default=False, compare=False)
    """Whether the axes only say where an array is stored: it is gathered where it meets the batch."""
    via: str = field(default="", compare=False)
    """The axis rule that the axes come from, if any: `mlp -> tensor`."""

    def __str__(self) -> str:
        names = [axis_name(a) for a in self.axes] + (["?"] if self.open else [])
        return "(" + ",".join(names) + ")" if len(names) > 1 else (names[0] if names else "-")


class MeshSizes(dict[str, int]):
    """Mesh axis -> size, with what a byte costs along the slow axes.

    Reshards weigh bytes by it; nothing else depends on it.
    """

    def __init__(self, sizes: Mapping[str, int], byte_costs: Mapping[str, float] | None = None):
        super().__init__(sizes)
        own = sizes.byte_costs if isinstance(sizes, MeshSizes) else {}
        self.byte_costs: Mapping[str, float] = own if byte_costs is None else byte_costs
        """Axis -> the time of a byte, relative to the fastest links of the mesh; 1 where it is missing."""


def byte_cost(axes: Iterable[Axis], sizes: Mapping[str, int]) -> float:
    """The time of a byte in groups over some axes, relative to the fastest links.

    A collective over fast and slow axes is hierarchical: each device of a fast group sends its part over the slow one.
    """
    if not isinstance(sizes, MeshSizes) or not sizes.byte_costs:
        return 1.0
    costs = [(sizes.byte_costs.get(a if isinstance(a, str) else a[0], 1.0), axis_size(a, sizes)) for a in axes]
    slowest = max((cost for cost, _ in costs), default=1.0)
    fast_group = math.prod(size for cost, size in costs if cost < slowest)
    return slowest if fast_group == 1 else 1.0 + (slowest - 1.0) / fast_group


OPEN = Dim(open=True)
CLOSED = Dim()


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """The sharding of one array: one `Dim` per dim."""

    dims: tuple[Dim, ...]
    unreduced: tuple[Axis, ...] = ()
    axes: tuple[tuple[Axis, ...], ...] = field(init=False, repr=False, compare=False)
    """The axes of each dim."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", tuple([d.axes for d in self.dims]))

    def __str__(self) -> str:
        return "[" + ", ".join(str(d) for d in self.dims) + "]"

    @property
    def is_open(self) -> bool:
        """Whether every dim is open and empty, hence unconstrained."""
        return all(d.open and not d.axes for d in self.dims)

    @property
    def has_sub_axes(self) -> bool:
        """Whether some dim is sharded over a sub-axis, which a `PartitionSpec` cannot express."""
        return any(not isinstance(a, str) for d in self.dims for a in d.axes)

    @property
    def row(self) -> Spec:
        """The spec of one row of a stacked array."""
        return Spec(dims=self.dims[1:])

    def num_shards(self, sizes: Mapping[str, int]) -> int:
        """The number of distinct shards."""
        return math.prod(num_parts(d.axes, sizes) for d in self.dims)


def open_spec(ndim: int) -> Spec:
    """The unconstrained spec."""
    return Spec(dims=(OPEN,) * ndim)


def closed_spec(ndim: int) -> Spec:
    """The spec of a replicated array."""
    return Spec(dims=(CLOSED,) * ndim)


def axis_name(axis: Axis) -> str:
    """`tensor`, or `tensor:(1)2` for a sub-axis, as in Shardy."""
    return axis if isinstance(axis, str) else f"{axis[0]}:({axis[1]}){axis[2]}"


def axis_size(axis: Axis, sizes: Mapping[str, int]) -> int:
    """The number of devices along an axis or sub-axis."""
    return sizes[axis] if isinstance(axis, str) else axis[2]


def num_parts(axes: Iterable[Axis], sizes: Mapping[str, int]) -> int:
    """The product of the axis sizes: the number of shards of a dim sharded over them."""
    found = 1
    for axis in axes:
        found *= axis_size(axis, sizes)
    return found


def cuts(axes: Iterable[Axis], sizes: Mapping[str, int]) -> dict[str, list[int]]:
    """For each mesh axis with sub-axes here, their boundaries as device counts, from 1 to the axis size."""
    found: dict[str, set[int]] = {}
    for axis in axes:
        if not isinstance(axis, str):
            name, pre, size = axis
            found.setdefault(name, {1, sizes[name]}).update((pre, pre * size))
    return {name: sorted(at) for name, at in found.items()}


def local_shape(axes: Sequence[Sequence[Axis]], shape: Sequence[int], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of one shard, with uneven dims padded to the largest shard.

    Args:
        axes: the axes of each dim.
        shape: the global shape.
        sizes: the mesh axis sizes.
    """
    return tuple(-(-n // num_parts(own, sizes)) if own else n for n, own in zip(shape, axes, strict=True))


def local_bytes(axes: Sequence[Sequence[Axis]], shape: Sequence[int], itemsize: int, sizes: Mapping[str, int]) -> int:
    """The bytes of one shard; arguments as for `local_shape`, and the bytes of an element."""
    return itemsize * math.prod(local_shape(axes, shape, sizes))


def from_partition_spec(
    spec: P, shape: tuple[int, ...], sizes: Mapping[str, int], *, asked: str, priority: int = 0
) -> Spec:
    """The `Spec` of a `PartitionSpec`: missing trailing dims are closed, `P.UNCONSTRAINED` and `(a, ...)` are open.

    Raises:
        ShardingError: unknown axes, axes used twice, or more entries than dims, all in one error.
    """
    if not isinstance(spec, P):
        raise ShardingError(
            asked,
            found=f"{spec!r}, of type {type(spec).__name__}",
            required="a PartitionSpec",
            fix=f"P{spec!r}" if isinstance(spec, tuple) else f"P({spec!r})",
        )
    refuse_unreduced(spec, asked)
    faults = _faults(spec, shape, sizes)
    if faults:
        raise ShardingError(
            asked,
            found=[f"spec {spec}, array of shape {tuple(shape)}, mesh axes {sizes_text(sizes)}", *faults],
            required="entries of None, P.UNCONSTRAINED, a mesh axis or a tuple of them; each axis at most once; "
            "at most one entry per dim",
            fix=_fix(spec, shape, sizes),
        )
    entries = tuple(spec) + (None,) * (len(shape) - len(spec))
    dims = tuple(_dim(e, sizes, priority) for e in entries)
    return Spec(dims=dims)


def refuse_unreduced(spec: Any, asked: str) -> None:
    """Raises for a PartitionSpec with unreduced or reduced axes, which only Explicit axes have."""
    pending = {kind: axes for kind in ("unreduced", "reduced") if (axes := getattr(spec, kind, None))}
    if pending:
        raise ShardingError(
            asked,
            found=f"{spec}: " + "; ".join(f"{kind} over {', '.join(sorted(axes))}" for kind, axes in pending.items()),
            required="a spec without pending sums: with Auto axes every sum is reduced by the op that computes it",
            fix=[
                "leave them out of the spec",
                "for an argument, jax.sharding.reshard(x, spec) without them before the call",
                "jax.sharding.explicit_axes around the part that needs them",
            ],
        )


def to_partition_spec(spec: Spec, *, keep_open: bool = False) -> P:
    """The nearest `PartitionSpec`, without trailing empty entries.

    It cannot express sub-axes: a dim keeps only the axes before its first sub-axis. With `keep_open`, open dims without
    axes and dims with sub-axes become `P.UNCONSTRAINED`, which leaves them to XLA.
    """
    return trimmed(_entry(d, keep_open) for d in spec.dims)


def trimmed(entries: Iterable[Any]) -> P:
    """A PartitionSpec of these entries, without the empty ones at the end."""
    kept = [*entries]
    while kept and kept[-1] is None:
        kept.pop()
    return P(*kept)


def limited_to(spec: P, axes: Iterable[str]) -> P:
    """A PartitionSpec with only these of its axes."""
    kept = frozenset(axes)
    return P(*(tuple(name for name in _names(entry) if name in kept) or None for entry in spec))


def partition_spec_of(array: Any) -> P:
    """The PartitionSpec of an array or ShapeDtypeStruct; that of a replicated array if it has no NamedSharding."""
    sharding = getattr(array, "sharding", None)
    return sharding.spec if isinstance(sharding, NamedSharding) else P()


def divisible(spec: Spec, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Spec:
    """`spec` with each dim limited to its longest prefix of axes that divides it, as JAX requires at jit boundaries."""
    if not spec.has_sub_axes and not any(n % num_parts(d.axes, sizes) for d, n in zip(spec.dims, shape, strict=True)):
        return spec
    dims = []
    for dim, size in zip(spec.dims, shape, strict=True):
        kept: list[Axis] = []
        for axis in dim.axes:
            if size % num_parts((*kept, axis), sizes) or not isinstance(axis, str):
                break
            kept.append(axis)
        dims.append(Dim(axes=tuple(kept), open=dim.open, priority=dim.priority))
    return Spec(dims=tuple(dims), unreduced=spec.unreduced)


def occupied(spec: Spec, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Spec:
    """`spec` with each dim limited to its longest prefix of axes that has no more devices than the dim has elements."""
    if all(not dim.axes or size >= num_parts(dim.axes, sizes) for dim, size in zip(spec.dims, shape, strict=True)):
        return spec
    dims = []
    for dim, size in zip(spec.dims, shape, strict=True):
        lengths = range(len(dim.axes) + 1)
        kept = max(k for k in lengths if k == 0 or num_parts(dim.axes[:k], sizes) <= size)
        dims.append(Dim(axes=dim.axes[:kept], open=dim.open, priority=dim.priority))
    return Spec(dims=tuple(dims), unreduced=spec.unreduced)


def indivisible(spec: Spec, shape: tuple[int, ...], sizes: Mapping[str, int]) -> list[str]:
    """One line of arithmetic per dim that its axes do not divide evenly; none for symbolic sizes."""
    lines = []
    for i, (dim, size) in enumerate(zip(spec.dims, shape, strict=True)):
        parts = num_parts(dim.axes, sizes)
        if not is_symbolic_dim(size) and size % parts:
            factors = " x ".join(f"{axis_name(a)}={axis_size(a, sizes)}" for a in dim.axes)
            lines.append(
                f"dim {i} of size {size} over {factors} = {parts}: {size} = {size // parts} x {parts} + {size % parts}"
            )
    return lines


def indivisible_error(
    spec: Spec, shape: tuple[int, ...], sizes: Mapping[str, int], *, asked: str, given: Any
) -> ShardingError | None:
    """The error of a spec whose axes do not divide the dims of an argument, result or parameter, if they don't.

    Args:
        spec: as resolved.
        shape: of the array.
        sizes: of the mesh axes.
        asked: the request.
        given: the spec as the user wrote it.
    """
    faults = indivisible(spec, shape, sizes)
    if not faults:
        return None
    return ShardingError(
        asked,
        found=[f"spec {given}, shape {tuple(shape)}", *faults],
        required="a dim divisible by the product of its axis sizes",
        fix=[f"size {n}" for n in _nearest_sizes(spec, shape, sizes)] + ["fewer axes on the dim, or P(None)"],
    )


def _nearest_sizes(spec: Spec, shape: tuple[int, ...], sizes: Mapping[str, int]) -> list[str]:
    out = []
    for d, (dim, size) in enumerate(zip(spec.dims, shape, strict=True)):
        parts = num_parts(dim.axes, sizes)
        if size % parts:
            out.append(
                " or ".join(str(n) for n in (size // parts * parts, -(-size // parts) * parts) if n) + f" in dim {d}"
            )
    return out


def _entry(dim: Dim, keep_open: bool) -> object:
    full = [a for a in dim.axes if isinstance(a, str)]
    if keep_open and ((dim.open and not dim.axes) or len(full) < len(dim.axes)):
        return P.UNCONSTRAINED
    names = tuple(full[: next((i for i, a in enumerate(dim.axes) if not isinstance(a, str)), len(full))])
    return None if not names else names[0] if len(names) == 1 else names


def _names(entry: object) -> tuple[object, ...]:
    if entry is None or entry is P.UNCONSTRAINED:
        return ()
    items = entry if isinstance(entry, tuple) else (entry,)
    return tuple(a for a in items if a is not Ellipsis and a is not P.UNCONSTRAINED)


def _dim(entry: object, sizes: Mapping[str, int], priority: int) -> Dim:
    if entry is P.UNCONSTRAINED or entry is Ellipsis:  # JAX writes (...,) as ...
        return Dim(open=True, priority=priority)
    is_open = isinstance(entry, tuple) and any(a is Ellipsis or a is P.UNCONSTRAINED for a in entry)
    axes = tuple(str(a) for a in _names(entry) if sizes[str(a)] > 1)
    return Dim(axes=axes, open=is_open, priority=priority)


def _faults(spec: P, shape: tuple[int, ...], sizes: Mapping[str, int]) -> list[str]:
    faults = []
    if len(spec) > len(shape):
        faults.append(f"{len(spec)} entries for {len(shape)} dims")
    seen: dict[object, int] = {}
    for i, entry in enumerate(spec):
        for name in _names(entry):
            if name not in sizes:
                faults.append(f"entry {i} names {name!r}, which is not a mesh axis")
            elif name in seen:
                where = f"in entry {i}" if seen[name] == i else f"in entries {seen[name]} and {i}"
                faults.append(f"axis {name!r} is used twice: {where}")
            seen.setdefault(name, i)
    return faults


def _fix(spec: P, shape: tuple[int, ...], sizes: Mapping[str, int]) -> list[str]:
    import difflib

    fixes = []
    unknown = [n for e in spec for n in _names(e) if n not in sizes]
    for name in unknown:
        near = difflib.get_close_matches(str(name), list(sizes), n=1, cutoff=0.5)
        if near:
            fixes.append(f"{near[0]!r} instead of {name!r}")
    if len(spec) > len(shape):
        fixes.append(f"P{tuple(spec)[: len(shape)]}" if len(shape) != 1 else f"P({tuple(spec)[0]!r})")
    once = P(*_once(spec))
    if not fixes and not unknown and once != spec:
        fixes.append(str(once))
    if unknown and not fixes:
        fixes.append("add the axis to sharding.mesh(...), or use one of " + ", ".join(map(repr, sizes)))
    return fixes


def _once(spec: P) -> list[object]:
    """The entries with only the first use of each axis kept."""
    seen: set[object] = set()
    entries: list[object] = []
    for entry in spec:
        kept = tuple(a for a in dict.fromkeys(entry if isinstance(entry, tuple) else (entry,)) if a not in seen)
        seen.update(_names(entry))
        entries.append((kept[0] if len(kept) == 1 else kept) or None)
    return entries


def sizes_text(sizes: Mapping[str, int]) -> str:
    """`data=2, tensor=4`."""
    return ", ".join(f"{k}={v}" for k, v in sizes.items()) or "(none)"
