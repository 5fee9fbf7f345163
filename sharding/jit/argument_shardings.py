"""The shardings required of argument and result leaves: from `in_shardings`, `out_shardings` and committed arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.experimental.layout import Format
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from .. import compat
from ..annotations import axis_rules
from ..annotations.layout import Layout
from ..annotations.prioritized import Prioritized
from ..errors import ShardingError, raise_together
from ..graph import Annotation, Graph
from ..spec import Spec, from_partition_spec, indivisible_error, to_partition_spec
from .arguments import Arguments
from .array_layouts import without_layout
from .cache_key import explicit_sharding


def of_arguments(specs: Any, call: Arguments) -> list[Any]:
    """`in_shardings` as a spec, or None, for every leaf of the arguments; keyword-only ones have none.

    An entry belongs to a parameter that is not static, in order, whether it is passed by position or by keyword.
    """
    function, tuples = call.signature.function, isinstance(specs, (tuple, list)) and not _is_spec(specs)
    if not tuples or len(call.labels) == call.num_positional:
        return broadcast_specs(specs, call.dynamic, "in_shardings", function)
    not_static = [n for n in range(len(call.signature.names)) if n not in call.signature.static]
    places = {label: k for k, label in enumerate(not_static)}
    entries = [specs[places[n]] if n in places and places[n] < len(specs) else None for n in call.labels]
    if len(specs) > len(not_static):
        entries = specs  # an error
    return broadcast_specs(tuple(entries), call.dynamic, "in_shardings", function)


def broadcast_specs(specs: Any, trees: Sequence[Any], what: str, function: str) -> list[Any]:
    """A spec, or None, for every leaf: `specs` is a pytree prefix, as for `jax.jit`.

    Args:
        specs: one spec for all, or a tuple with one prefix per tree. A `Layout` gives the specs of all below it.
        trees: the pytrees; their leaves may be anything.
        what: `in_shardings` or `out_shardings`, for errors.
        function: the function's name, for errors.
    """
    if isinstance(specs, Layout):
        return jax.tree.leaves(specs(trees), is_leaf=_is_spec)
    if _is_spec(specs):
        return [specs for tree in trees for _ in jax.tree.leaves(tree)]
    if what == "in_shardings" and (not isinstance(specs, (tuple, list)) or len(specs) != len(trees)):
        raise ShardingError(
            f"{function}: {what}",
            found=f"{len(trees)} arguments, and {what} is {_outline(specs)}",
            required="a tuple with one entry per non-static argument; None leaves the argument open",
            fix=f"{what}=({', '.join(['None'] * len(trees))}{',' if len(trees) == 1 else ''})",
        )
    prefix = tuple(specs) if what == "in_shardings" else (specs,)
    out: list[Any] = []
    for i, (entry, tree) in enumerate(zip(prefix, trees, strict=True)):
        try:
            full = jax.tree.broadcast(_marked(entry), tree)
        except ValueError as e:
            subject = "argument" if what == "in_shardings" else "result"
            raise ShardingError(
                f"{function}: {what}" + (f"[{i}]" if what == "in_shardings" else ""),
                found=[f"the {subject} is {_outline(tree)}", f"the specs are {_outline(entry)}", _mismatch(e)],
                required=f"specs that are a pytree prefix of the {subject}",
                fix=f"None for the entire {subject}, or sharding.annotate inside the function",
            ) from e
        if any(isinstance(s, Layout) for s in jax.tree.leaves(full)):
            full = jax.tree.map(lambda s, own: _marked(s(own)) if isinstance(s, Layout) else s, _marked(entry), tree)
            full = jax.tree.broadcast(full, tree)
        out += [None if s is ... else s for s in jax.tree.leaves(full)]
    return out


def _marked(specs: Any) -> Any:
    """A pytree of specs with `...` in place of None, which is no leaf for JAX."""
    return jax.tree.map(lambda s: ... if s is None else s, specs, is_leaf=_is_spec)


def _mismatch(error: ValueError) -> str:
    """JAX's description of how two trees differ, with the path: `different lengths of list at ['b']['d']`."""
    what, where = [*str(error).splitlines(), ""][:2]
    where = where.strip().removeprefix("broadcast_prefix prefix_tree") or "the root"
    return f"{what.removeprefix('pytree structure error: ').removesuffix(' key path')} {where}"


def _is_spec(x: Any) -> bool:
    return x is None or isinstance(x, (P, Sharding, Prioritized, Format))


def _outline(tree: Any) -> str:
    text = str(jax.tree.structure(tree, is_leaf=_is_spec)).removeprefix("PyTreeDef(").removesuffix(")")
    return text if len(text) < 160 else text[:157] + "..."


def leaf_annotations(
    specs: Sequence[Any], avals: Sequence[Any], names: Sequence[str], mesh: Any, *, what: str, function: str
) -> list[Annotation | None]:
    """The user's spec of each leaf, resolved; one error reports all faults of all leaves."""
    sizes = dict(mesh.shape)
    found: list[Annotation | None] = []
    failures: list[ShardingError] = []
    for entry, aval, name in zip(specs, avals, names, strict=True):
        try:
            found.append(_resolve(entry, aval, f"{function}({name}): {what}", sizes, mesh, what))
        except ShardingError as e:
            failures.append(e)
    raise_together(f"{function}: {what}", failures)
    return found


def memory_kinds(
    entries: Sequence[Any], leaves: Sequence[Any], names: Sequence[str], function: str
) -> list[str | None]:
    """The kind of memory that each argument arrives in: as `in_shardings` says, or as the array does.

    Args:
        entries: of `in_shardings`, one per leaf.
        leaves: the arguments.
        names: their paths.
        function: its name, for errors.

    Raises:
        ShardingError: an array committed to another kind of memory than `in_shardings` says.
    """
    found: list[str | None] = []
    failures = []
    for entry, leaf, name in zip(entries, leaves, names, strict=True):
        asked = memory_kind(entry)
        is_placed = isinstance(leaf, jax.ShapeDtypeStruct) or compat.is_committed(leaf)
        have = memory_kind(leaf.sharding) if is_placed else None
        if asked is not None and have is not None and asked != have:
            failures.append(
                ShardingError(
                    f"{function}({name})",
                    found=[f"the array is in {have} memory", f"in_shardings requires {asked} memory"],
                    required="a committed array in that kind of memory",
                    fix="jax.device_put it first, or drop memory_kind from in_shardings",
                )
            )
        found.append(asked or have)
    raise_together(f"{function}: arguments", failures)
    return found


def memory_kind(entry: Any) -> str | None:
    """The kind of memory that a sharding names; None if it names none."""
    entry = without_layout(entry)
    return entry.memory_kind if isinstance(entry, Sharding) else None


def _resolve(entry: Any, aval: Any, asked: str, sizes: Mapping[str, int], mesh: Any, what: str) -> Annotation | None:
    entry = without_layout(entry)
    if entry is None:
        return None
    priority = 0
    if isinstance(entry, Prioritized):
        entry, priority = entry.spec, entry.priority
    if isinstance(entry, Sharding):
        entry = spec_on_mesh(entry, mesh, asked)
        spec = from_partition_spec(entry, aval.shape, sizes, asked=asked)
    else:
        spec = axis_rules.resolve(entry, aval.shape, sizes, asked=asked, priority=priority)
    error = indivisible_error(spec, aval.shape, sizes, asked=asked, given=entry)
    if error is not None:
        raise error
    return None if spec.is_open else Annotation(spec=spec, origin=what)


def spec_on_mesh(sharding: Sharding, mesh: Any, asked: str) -> P:
    """The PartitionSpec of a sharding on `mesh`; an error if it is on another mesh."""
    if isinstance(sharding, NamedSharding) and _same_mesh(sharding.mesh, mesh):
        return sharding.spec
    if isinstance(mesh, Mesh) and sharding.device_set == set(mesh.devices.flat) and sharding.is_fully_replicated:
        return P()
    other = sharding.mesh.shape if isinstance(sharding, NamedSharding) else f"{len(sharding.device_set)} devices"
    raise ShardingError(
        asked,
        found=[
            f"an array on {dict(other) if not isinstance(other, str) else other}: {sharding}",
            f"the current mesh is {dict(mesh.shape)}",
        ],
        required="an array sharded over the current mesh, or replicated over its devices",
        fix=[
            "jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))",
            "enter the mesh under which the array was created",
        ],
    )


def _same_mesh(a: Any, b: Any) -> bool:
    if a.axis_names != b.axis_names or a.axis_sizes != b.axis_sizes:
        return False
    return not (isinstance(a, Mesh) and isinstance(b, Mesh)) or bool((a.devices == b.devices).all())


def with_committed_shardings(
    leaves: Sequence[Any], requested: Sequence[Annotation | None], names: Sequence[str], mesh: Any, function: str
) -> list[Annotation | None]:
    """The requested specs, with the shardings of committed and abstract arrays where the user requested none.

    Raises:
        ShardingError: a committed array that contradicts the request, or is on another mesh.
    """
    sizes, out, failures = dict(mesh.shape), [], []
    for leaf, annotation, name in zip(leaves, requested, names, strict=True):
        sharding = committed_sharding(leaf, mesh)
        if sharding is None:
            out.append(annotation)
            continue
        try:
            pspec = spec_on_mesh(sharding, mesh, f"{function}({name})")
            have = Annotation(
                spec=from_partition_spec(pspec, leaf.shape, sizes, asked=name), origin="the argument's sharding"
            )
            out.append(_reconciled(annotation, have, f"{function}({name})"))
        except ShardingError as e:
            failures.append(e)
    raise_together(f"{function}: arguments", failures)
    return out


def committed_sharding(leaf: Any, mesh: Any) -> Sharding | None:
    """The sharding of a committed array, or of an abstract array that has one.

    An array replicated over all devices of the mesh does not count: that is how JAX creates arrays under a mesh. One
    whose spec says so dim by dim does: `P(None, None)`.
    """
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.sharding
    if not compat.is_committed(leaf):
        return explicit_sharding(leaf)
    return None if is_replicated_by_default(leaf, mesh) else leaf.sharding


def is_replicated_by_default(leaf: Any, mesh: Any) -> bool:
    """Whether an array is replicated over the devices of the mesh, and its spec does not name its dims."""
    if not compat.is_committed(leaf) or not leaf.sharding.is_fully_replicated or not isinstance(mesh, Mesh):
        return False
    is_named = isinstance(leaf.sharding, NamedSharding) and len(leaf.sharding.spec) > 0
    is_named &= not compat.is_extended(leaf.dtype)  # JAX names the dims of every array of PRNG keys
    return not is_named and leaf.sharding.device_set == set(mesh.devices.flat)


def replicated_by_default(graph: Graph, leaves: Sequence[Any], mesh: Any) -> frozenset[int]:
    """The arguments without an annotation that arrive replicated over the mesh as JAX creates arrays."""
    pairs = zip(graph.inputs, leaves, strict=True)
    return frozenset(v for v, x in pairs if v not in graph.annotations and is_replicated_by_default(x, mesh))


def _reconciled(annotation: Annotation | None, have: Annotation, asked: str) -> Annotation:
    if annotation is None:
        return have
    if annotation.spec.axes == have.spec.axes:
        dims = tuple(replace(d, open=False) for d in annotation.spec.dims)  # a committed array keeps its sharding
        return Annotation(spec=Spec(dims=dims), origin=annotation.origin)
    pairs = zip(annotation.spec.dims, have.spec.dims, strict=True)
    if all(h.axes == d.axes or (d.open and h.axes[: len(d.axes)] == d.axes) for d, h in pairs):
        return have
    raise ShardingError(
        asked,
        found=[
            f"the array is committed to {to_partition_spec(have.spec)}",
            f"{annotation.origin} requires {to_partition_spec(annotation.spec)}",
        ],
        required="a committed array whose sharding matches",
        fix="jax.device_put it first, or drop one of the two",
    )
