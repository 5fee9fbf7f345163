"""What a caller of a jitted function passes: positional, static, donated; leaves, paths and what is asked of each."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from . import compat, logical
from .errors import ShardingError, raise_together
from .graph import Pin
from .spec import Spec, from_partition_spec, indivisible, to_partition_spec

Names = str | Sequence[str]
Nums = int | Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """The parameters of a function, and which of them are static or donated."""

    function: str
    names: tuple[str, ...]
    variadic: str | None
    static: frozenset[int]
    donated: frozenset[int]
    signature: inspect.Signature | None

    @staticmethod
    def of(
        f: Callable[..., Any],
        static_argnums: Nums,
        static_argnames: Names,
        donate_argnums: Nums,
        donate_argnames: Names,
    ) -> Signature:
        """Reads the signature of `f`; numbers and names mean the same parameters."""
        name = getattr(f, "__name__", type(f).__name__)
        try:
            signature = inspect.signature(f)
        except (TypeError, ValueError):
            signature = None
        parameters = list(signature.parameters.values()) if signature else []
        names = tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))
        variadic = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)

        def positions(nums: Nums, by_name: Names, what: str) -> frozenset[int]:
            nums = (nums,) if isinstance(nums, int) else tuple(nums)
            by_name = (by_name,) if isinstance(by_name, str) else tuple(by_name)
            unknown = [n for n in by_name if n not in names]
            if unknown:
                raise ShardingError(
                    f"sharding.jit({name}, {what}_argnames={list(by_name)})",
                    there=f"{name} has the parameters {', '.join(names) or '(none)'}",
                    must="each name is a positional parameter",
                    fix=[f"leave out {n!r}" for n in unknown],
                )
            outside = [n for n in nums if not -len(names) <= n < len(names)]
            if outside and signature is not None and variadic is None:
                raise ShardingError(
                    f"sharding.jit({name}, {what}_argnums={list(nums)})",
                    there=f"{name} has {len(names)} positional parameters: {', '.join(names) or '(none)'}",
                    must="each number is that of a positional parameter",
                    fix=[f"leave out {n}" for n in outside],
                )
            return frozenset(n % len(names) if n < 0 and names else n for n in nums) | {names.index(n) for n in by_name}

        static = positions(static_argnums, static_argnames, "static")
        donated = positions(donate_argnums, donate_argnames, "donate")
        if static & donated:
            both = ", ".join(names[n] if n < len(names) else str(n) for n in sorted(static & donated))
            raise ShardingError(
                f"sharding.jit({name})",
                there=f"{both}: both static and donated",
                must="what is donated is an argument of the compiled program, what is static is not",
                fix=f"leave {both} out of one of the two",
            )
        return Signature(
            function=name,
            names=names,
            variadic=variadic,
            static=static,
            donated=donated,
            signature=signature,
        )

    def positional(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """All arguments by position, defaults filled in where a later keyword needs them."""
        if not kwargs:
            return args
        if self.signature is None:
            raise ShardingError(
                f"{self.function}(..., {', '.join(kwargs)}=...)",
                there="a function whose signature Python can't tell",
                must="arguments by position",
            )
        bound = self.signature.bind(*args, **kwargs)
        if bound.kwargs:
            bound.apply_defaults()
        if bound.kwargs:
            raise ShardingError(
                f"{self.function}(..., {', '.join(bound.kwargs)}=...)",
                there="keyword-only parameters",
                must="each argument can be passed by position, so that in_shardings can speak of it",
                fix="functools.partial(f, ...) for static ones, or take the `*` out of the signature",
            )
        return bound.args

    def name(self, position: int) -> str:
        """The name of a positional argument."""
        if position < len(self.names):
            return self.names[position]
        return f"{self.variadic or 'args'}/{position - len(self.names)}"


def per_leaf(specs: Any, trees: Sequence[Any], what: str, function: str) -> list[Any]:
    """A spec, or None, for every leaf: `specs` is a prefix of the trees, as for `jax.jit`.

    Args:
        specs: one spec for all, or a tuple with one prefix per tree.
        trees: the pytrees, whose leaves are anything.
        what: `in_shardings` or `out_shardings`, for errors.
        function: the function's name, for errors.
    """
    if _is_spec(specs):
        return [specs for tree in trees for _ in jax.tree.leaves(tree)]
    if what == "in_shardings" and (not isinstance(specs, (tuple, list)) or len(specs) != len(trees)):
        raise ShardingError(
            f"{function}: {what}",
            there=f"{len(trees)} arguments, and {what} is {_outline(specs)}",
            must="one entry per argument that is not static, in a tuple; None leaves an argument open",
            fix=f"{what}=({', '.join(['None'] * len(trees))}{',' if len(trees) == 1 else ''})",
        )
    prefix = tuple(specs) if what == "in_shardings" else (specs,)
    out: list[Any] = []
    for i, (entry, tree) in enumerate(zip(prefix, trees, strict=True)):
        try:
            said = jax.tree.map(lambda s: ... if s is None else s, entry, is_leaf=_is_spec)  # None is no leaf to JAX
            full = jax.tree.broadcast(said, tree)
        except ValueError as e:
            whole = "argument" if what == "in_shardings" else "result"
            raise ShardingError(
                f"{function}: {what}" + (f"[{i}]" if what == "in_shardings" else ""),
                there=[f"the {whole} is {_outline(tree)}", f"the specs are {_outline(entry)}", _mismatch(e)],
                must=f"the specs are a prefix of the {whole}'s pytree",
                fix=f"None for the whole {whole}, or sharding.annotate inside the function",
            ) from e
        out += [None if s is ... else s for s in jax.tree.leaves(full)]
    return out


def _mismatch(error: ValueError) -> str:
    """What JAX says of two trees that don't fit, and where: `different lengths of list at ['b']['d']`."""
    what, where = [*str(error).splitlines(), ""][:2]
    where = where.strip().removeprefix("broadcast_prefix prefix_tree") or "the top"
    return f"{what.removeprefix('pytree structure error: ').removesuffix(' key path')} {where}"


def _is_spec(x: Any) -> bool:
    return x is None or isinstance(x, (P, Sharding))


def _outline(tree: Any) -> str:
    text = str(jax.tree.structure(tree, is_leaf=_is_spec)).removeprefix("PyTreeDef(").removesuffix(")")
    return text if len(text) < 160 else text[:157] + "..."


def pins(
    specs: Sequence[Any], avals: Sequence[Any], names: Sequence[str], mesh: Any, *, what: str, function: str
) -> list[Pin | None]:
    """What the user's specs ask of each leaf; every fault of every leaf in one error."""
    sizes = dict(mesh.shape)
    found: list[Pin | None] = []
    failures: list[ShardingError] = []
    for entry, aval, name in zip(specs, avals, names, strict=True):
        try:
            found.append(_pin(entry, aval, f"{function}({name}): {what}", sizes, mesh, what))
        except ShardingError as e:
            failures.append(e)
    raise_together(f"{function}: {what}", failures)
    return found


def _pin(entry: Any, aval: Any, asked: str, sizes: Mapping[str, int], mesh: Any, what: str) -> Pin | None:
    if entry is None:
        return None
    if isinstance(entry, Sharding):
        entry = spec_of(entry, mesh, asked)
        spec = from_partition_spec(entry, aval.shape, sizes, asked=asked)
    else:
        spec = logical.resolve(entry, aval.shape, sizes, asked=asked)
    faults = indivisible(spec, aval.shape, sizes)
    if faults:
        raise ShardingError(
            asked,
            there=[f"spec {entry}, shape {tuple(aval.shape)}", *faults],
            must="the axes' sizes divide the dim",
            fix=[f"size {n}" for n in _nearest_sizes(spec, aval.shape, sizes)] + ["fewer axes on the dim, or P(None)"],
        )
    return None if spec.is_open else Pin(spec=spec, origin=what)


def _nearest_sizes(spec: Spec, shape: tuple[int, ...], sizes: Mapping[str, int]) -> list[str]:
    out = []
    for d, (dim, size) in enumerate(zip(spec.dims, shape, strict=True)):
        parts = Spec(dims=(dim,)).num_shards(sizes)
        if size % parts:
            out.append(
                " or ".join(str(n) for n in (size // parts * parts, -(-size // parts) * parts) if n) + f" in dim {d}"
            )
    return out


def spec_of(sharding: Sharding, mesh: Any, asked: str) -> P:
    """The PartitionSpec of a sharding on `mesh`; an error if it is on another mesh."""
    if isinstance(sharding, NamedSharding) and _same_mesh(sharding.mesh, mesh):
        return sharding.spec
    if isinstance(mesh, Mesh) and sharding.device_set == set(mesh.devices.flat) and sharding.is_fully_replicated:
        return P()
    there = sharding.mesh.shape if isinstance(sharding, NamedSharding) else f"{len(sharding.device_set)} devices"
    raise ShardingError(
        asked,
        there=[
            f"the array lies on {dict(there) if not isinstance(there, str) else there}: {sharding}",
            f"the mesh is {dict(mesh.shape)}",
        ],
        must="an array that was placed on devices is on those of the mesh in force",
        fix=[
            "jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))",
            "enter the mesh that the array was made under",
        ],
    )


def _same_mesh(a: Any, b: Any) -> bool:
    if a.axis_names != b.axis_names or a.axis_sizes != b.axis_sizes:
        return False
    return not (isinstance(a, Mesh) and isinstance(b, Mesh)) or bool((a.devices == b.devices).all())


def committed(
    leaves: Sequence[Any], asked: Sequence[Pin | None], names: Sequence[str], mesh: Any, function: str
) -> list[Pin | None]:
    """The pins with the shardings of placed arrays and abstract arrays added where the user said nothing.

    Raises:
        ShardingError: a placed array that contradicts what the user asked, or lies on another mesh.
    """
    sizes, out, failures = dict(mesh.shape), [], []
    for leaf, pin, name in zip(leaves, asked, names, strict=True):
        sharding = placed(leaf, mesh)
        if sharding is None:
            out.append(pin)
            continue
        try:
            pspec = spec_of(sharding, mesh, f"{function}({name})")
            have = Pin(spec=from_partition_spec(pspec, leaf.shape, sizes, asked=name), origin="the argument's sharding")
            out.append(_agreed(pin, have, f"{function}({name})"))
        except ShardingError as e:
            failures.append(e)
    raise_together(f"{function}: arguments", failures)
    return out


def placed(leaf: Any, mesh: Any) -> Sharding | None:
    """The sharding of an array that was placed on purpose, or of an abstract array that has one.

    An array that is whole on every device of the mesh does not count: that is how JAX makes arrays under a mesh.
    """
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.sharding
    if not compat.is_committed(leaf):
        return None
    whole = leaf.sharding.is_fully_replicated and isinstance(mesh, Mesh)
    return None if whole and leaf.sharding.device_set == set(mesh.devices.flat) else leaf.sharding


def _agreed(pin: Pin | None, have: Pin, asked: str) -> Pin:
    if pin is None:
        return have
    if pin.spec.axes == have.spec.axes:
        dims = tuple(replace(d, open=False) for d in pin.spec.dims)  # where it lies, it stays
        return Pin(spec=Spec(dims=dims), origin=pin.origin)
    pairs = zip(pin.spec.dims, have.spec.dims, strict=True)
    if all(h.axes == d.axes or (d.open and h.axes[: len(d.axes)] == d.axes) for d, h in pairs):
        return have
    raise ShardingError(
        asked,
        there=[
            f"the array is placed as {to_partition_spec(have.spec)}",
            f"{pin.origin} asks {to_partition_spec(pin.spec)}",
        ],
        must="a placed array is where it is asked to be",
        fix="jax.device_put it first, or leave one of the two out",
    )
