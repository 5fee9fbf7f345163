"""Logical axis names, and the rules that map them to mesh axes.

A program with logical names is independent of the mesh: `P("batch", "heads")` is resolved with the current rules and
mesh. The idea is Mesh-TensorFlow's (Shazeer et al., arXiv:1811.02084, section 3): a layout maps named dims to mesh
dims, and is injective within each tensor.
"""

from __future__ import annotations

import dataclasses
import difflib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from ..errors import ShardingError, raise_together
from ..mesh import current
from ..spec import Spec, from_partition_spec, refuse_unreduced, sizes_text

Entry = Any
"""One entry of a PartitionSpec: None, a mesh axis, a tuple of them, or P.UNCONSTRAINED."""

AxisRulesLike = Mapping[str, Entry] | Iterable[tuple[str, Entry]]
"""Logical name -> entry, as a mapping or, as in flax, as pairs."""


def axis_rules(rules: AxisRulesLike, *, optional: Sequence[str] = ()) -> AxisRules:
    """A context manager for rules whose names can be used in every `P(...)` that this library accepts.

    Args:
        rules: logical name -> a mesh axis, a tuple of them (major first), None (replicated and closed) or
            `P.UNCONSTRAINED` (inferred). A mapping, or pairs as in flax.
        optional: mesh axes that a mesh may lack, where they count as axes of size 1, so that one table serves many
            meshes. Any other axis of a used rule must exist, so that a misspelled one is an error.

    Raises:
        ShardingError: a name or value of the wrong type, or a name with two rules.

    Contexts nest: inner rules extend the outer ones and override those of the same name. A name has one rule, and two
    dims of one array cannot map to the same mesh axis: the error names both dims and both rules, even if the axis is
    optional and absent. (T5X and flax linen silently take the next rule of the name, or none.) A name that is both
    logical and a mesh axis is an error too, unless its rule maps it to itself.

    Rules are part of JAX's trace cache key: under other rules a function is traced and compiled again. flax nnx shards
    a parameter with logical names when it is created; if flax is imported, the context sets these rules there too.

    Example:
        >>> import sharding
        >>> from sharding.annotations.axis_rules import resolve
        >>> with sharding.mesh(devices=8, data=2, tensor=4), sharding.axis_rules({"batch": "data", "mlp": "tensor"}):
        ...     str(resolve(P("batch", "mlp"), (16, 64), {"data": 2, "tensor": 4}, asked="x"))
        '[data, tensor]'
    """
    pairs: tuple[Any, ...] = tuple(rules.items() if isinstance(rules, Mapping) else rules)
    optional = (optional,) if isinstance(optional, str) else tuple(optional)
    raise_together("sharding.axis_rules", list(_invalid_rules(pairs, optional)))
    return AxisRules(pairs=pairs, optional=optional)


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisRules:
    """A context manager that adds rules to those of the enclosing contexts."""

    pairs: tuple[tuple[str, Entry], ...]
    optional: tuple[str, ...] = ()

    def __enter__(self) -> AxisRules:
        outer = in_force()
        pairs = {**dict(outer.pairs), **dict(self.pairs)}
        both = AxisRules(pairs=tuple(pairs.items()), optional=tuple(dict.fromkeys((*outer.optional, *self.optional))))
        with ExitStack() as stack:
            stack.enter_context(_CONTEXT(both))
            flax = sys.modules.get("flax.core.spmd")
            if flax is not None:
                stack.enter_context(flax.logical_axis_rules(_FlaxPairs.over(flax.get_logical_axis_rules(), both)))
            _ENTERED.set((*_ENTERED.get(), stack.pop_all()))
        return both

    def __exit__(self, *exc_info: object) -> None:
        *outer, stack = _ENTERED.get()
        _ENTERED.set(tuple(outer))
        stack.close()

    def __str__(self) -> str:
        return ", ".join(f"{name} -> {_entry_text(entry)}" for name, entry in self.pairs) or "(none)"


_CONTEXT = jax.make_user_context(AxisRules(pairs=()))  # in the cache key of every trace, ours and that of `jax.jit`
_ENTERED: ContextVar[tuple[ExitStack, ...]] = ContextVar("sharding.axis_rules", default=())


def in_force() -> AxisRules:
    """The current rules; empty outside of any context."""
    return _CONTEXT.value


def unused(specs: Iterable[Spec]) -> tuple[str, ...]:
    """The current rules that no dim of some specs comes from, each as `mlp -> tensor`."""
    used = {via for spec in specs for dim in spec.dims for via in dim.via.split(", ")}
    rules = (f"{name} -> {_entry_text(entry)}" for name, entry in in_force().pairs)
    return tuple(rule for rule in rules if rule not in used)


def resolve(spec: P, shape: tuple[int, ...], sizes: Mapping[str, int], *, asked: str, priority: int = 0) -> Spec:
    """The `Spec` of a `PartitionSpec` that may contain logical names.

    Args:
        spec: the user's spec.
        shape: of the array.
        sizes: of the mesh axes it may name.
        asked: the request, for errors.
        priority: of every dim.

    Raises:
        ShardingError: as `from_partition_spec`; a name that is neither a mesh axis nor logical, or both; a rule with
            an unknown axis; a mesh axis that two dims map to.
    """
    rules = in_force()
    refuse_unreduced(spec, asked)
    if not rules.pairs or not isinstance(spec, P):
        return from_partition_spec(spec, shape, sizes, asked=asked, priority=priority)
    resolver = _Resolver(rules, sizes)
    faults, fixes = resolver.faults(spec)
    if faults:
        raise ShardingError(
            asked,
            found=[f"spec {spec}, mesh axes {sizes_text(sizes)}", f"axis rules {rules}", *faults],
            required="mesh axes, or names whose rules map to mesh axes; each mesh axis on at most one dim of an array",
            fix=fixes,
        )
    found = from_partition_spec(P(*map(resolver.entry, spec)), shape, sizes, asked=asked, priority=priority)
    via = [resolver.via(e) for e in spec] + [""] * (len(shape) - len(spec))
    dims = (dataclasses.replace(d, via=v) for d, v in zip(found.dims, via, strict=True))
    return dataclasses.replace(found, dims=tuple(dims))


@dataclass(frozen=True, slots=True)
class _Resolver:
    """Resolves names with one table of rules on one mesh."""

    rules: AxisRules
    sizes: Mapping[str, int]

    def rule(self, name: Any) -> Entry:
        """The entry that a name maps to: itself if it has no rule."""
        return next((entry for n, entry in self.rules.pairs if n == name), name) if isinstance(name, str) else name

    def known(self, name: str) -> bool:
        return any(n == name for n, _ in self.rules.pairs)

    def is_absent_optional(self, axis: Any) -> bool:
        return isinstance(axis, str) and axis not in self.sizes and axis in self.rules.optional

    def entry(self, entry: Entry) -> Entry:
        """The entry of a dim with names resolved and absent optional axes dropped."""
        items = [a for part in _parts(entry) for a in _parts(self.rule(part)) if not self.is_absent_optional(a)]
        if not items:
            return None
        return items[0] if len(items) == 1 and items[0] is not Ellipsis else tuple(items)

    def via(self, entry: Entry) -> str:
        """The rules that apply to the entry of a dim, as text."""
        used = [f"{n} -> {_entry_text(self.rule(n))}" for n in _names(entry) if self.known(n)]
        return ", ".join(used)

    def faults(self, spec: P) -> tuple[list[str], list[str]]:
        """The faults of the names in a spec, and fixes."""
        faults: dict[str, str] = {}
        holders: dict[str, tuple[int, str]] = {}
        for dim, entry in enumerate(spec):
            for name in _names(entry):
                found = self.fault(dim, name)
                faults.update([found] if found else [])
                for axis in _names(self.rule(name)):
                    at = holders.setdefault(axis, (dim, name))
                    if at != (dim, name) and (self.known(name) or self.known(at[1])):
                        line = f"{self.dim_text(*at)} and {self.dim_text(dim, name)}: both map to {axis!r}"
                        faults[line] = f"another axis for one of {at[1]!r} and {name!r}, or None in the spec"
        return list(faults), list(dict.fromkeys(faults.values()))

    def dim_text(self, dim: int, name: str) -> str:
        return f"dim {dim} {name!r}" + (f" (rule {self.via(name)})" if self.known(name) else "")

    def fault(self, dim: int, name: str) -> tuple[str, str] | None:
        """Why a name cannot be resolved, and a fix."""
        rule, axes = self.rule(name), list(self.sizes)
        if self.known(name) and name in self.sizes and rule != name:
            return (
                f"dim {dim} {name!r} is both a mesh axis and a logical name ({self.via(name)})",
                f"another name for the rule {name!r}",
            )
        if not self.known(name) and name not in self.sizes:
            names = [n for n, _ in self.rules.pairs]
            near = difflib.get_close_matches(name, [*axes, *names], n=1, cutoff=0.5)
            fix = f"{near[0]!r} instead of {name!r}" if near else f"a rule for {name!r} in sharding.axis_rules(...)"
            return f"dim {dim} {name!r} is neither a mesh axis nor a logical name with a rule", fix
        absent = [a for a in _names(rule) if a not in self.sizes and a not in self.rules.optional]
        if not absent:
            return None
        near = difflib.get_close_matches(absent[0], axes, n=1, cutoff=0.6)
        fix = f"{near[0]!r} instead of {absent[0]!r}" if near else f"sharding.mesh(..., {absent[0]}=1)"
        missing = ", ".join(map(repr, absent))
        return (
            f"dim {dim} {name!r} has the rule {self.via(name)}, but the mesh has no axis {missing}",
            f"{fix}, or optional=({absent[0]!r},) for rules shared between meshes",
        )


@dataclass(frozen=True, eq=False)
class _FlaxPairs(list[tuple[str, Entry]]):  # flax checks the type
    """The rules as the pairs that flax expects, resolved on the current mesh when flax reads them."""

    rules: AxisRules
    own: tuple[tuple[str, Entry], ...]
    """The rules set in flax before."""

    @staticmethod
    def over(outer: Any, rules: AxisRules) -> _FlaxPairs:
        own = outer.own if isinstance(outer, _FlaxPairs) else tuple(outer)
        return _FlaxPairs(rules, tuple((n, e) for n, e in own if n not in dict(rules.pairs)))

    def __len__(self) -> int:
        return len(self.own) + len(self.rules.pairs)

    def __iter__(self) -> Iterator[tuple[str, Entry]]:
        yield from self.own
        mesh = current()
        resolver = _Resolver(self.rules, dict(mesh.shape) if mesh is not None else {})
        for name, _ in self.rules.pairs:
            axes = tuple(a for a in _parts(resolver.entry(name)) if isinstance(a, str))
            yield name, axes[0] if len(axes) == 1 else axes or None


def _parts(entry: Entry) -> tuple[Any, ...]:
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def _names(entry: Entry) -> list[str]:
    return [a for a in _parts(entry) if isinstance(a, str)]


def _entry_text(entry: Entry) -> str:
    if entry is None or entry == ():
        return "replicated"
    words = [a if isinstance(a, str) else "..." if a is Ellipsis else "open" for a in _parts(entry)]
    return words[0] if len(words) == 1 else f"({', '.join(words)})"


def _invalid_rules(pairs: Sequence[Any], optional: Sequence[Any]) -> Iterator[ShardingError]:
    required = "rules from a name to a mesh axis, a tuple of them, None or P.UNCONSTRAINED"
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str) or not _is_entry(pair[1]):
            text = f"{pair[0]!r}: {pair[1]!r}" if isinstance(pair, tuple) and len(pair) == 2 else repr(pair)
            yield ShardingError(
                "sharding.axis_rules(...)", found=text, required=required, fix='{"batch": ("data", "fsdp")}'
            )
    names = [pair[0] for pair in pairs if isinstance(pair, tuple) and pair]
    twice = [n for i, n in enumerate(names) if isinstance(n, str) and n in names[:i]]
    for name in dict.fromkeys(twice):
        values = [_entry_text(e) for n, e in pairs if n == name]
        yield ShardingError(
            f"sharding.axis_rules(...): {name!r}",
            found=f"rules {' and '.join(f'{name} -> {v}' for v in values)}",
            required="one rule per name",
            fix=f"two names, or a tuple: {name!r}: ({', '.join(repr(v) for v in values)})",
        )
    if not all(isinstance(a, str) for a in optional):
        yield ShardingError(
            f"sharding.axis_rules(optional={optional!r})", required="names of mesh axes", fix="('fsdp',)"
        )


def _is_entry(entry: Entry) -> bool:
    fine = [isinstance(a, str) or a is P.UNCONSTRAINED or a is Ellipsis for a in _parts(entry)]
    names = _names(entry)
    return all(fine) and entry is not Ellipsis and len(set(names)) == len(names)
