"""Logical axes: names for the dims of arrays, and the rules that say which mesh axes split them.

A program written with logical names says nothing of a mesh: `P("batch", "heads")` is resolved where it is taken, by
the rules and the mesh in force there. The idea is Mesh-TensorFlow's (Shazeer et al., arXiv:1811.02084, section 3): a
layout maps named dims to mesh dims, and is injective within each tensor.
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

from .errors import ShardingError, raise_together
from .mesh import current
from .spec import Spec, from_partition_spec, sizes_text

Entry = Any
"""What one dim of a PartitionSpec may be: None, a mesh axis, a tuple of them, P.UNCONSTRAINED."""

AxisRulesLike = Mapping[str, Entry] | Iterable[tuple[str, Entry]]
"""Logical name -> entry, as a mapping or, as in flax, as pairs."""


def axis_rules(rules: AxisRulesLike, *, optional: Sequence[str] = ()) -> AxisRules:
    """Rules to enter with `with`: in the block their names may stand in every `P(...)` that this library takes.

    Args:
        rules: logical name -> what it stands for: a mesh axis, a tuple of them (major first), None (whole and closed)
            or `P.UNCONSTRAINED` (left to the pass). A mapping, or pairs as in flax.
        optional: mesh axes that a mesh may lack; there they count as axes of size 1. So one table serves many meshes.
            Any other axis that a used rule names must be there, so that a misspelt one is an error.

    Raises:
        ShardingError: a name or a value of another type, or a name with two rules.

    Blocks nest: inner rules come on top of the outer ones and replace those of the same name. A name has one rule, and
    two dims of one array never get the same mesh axis: that is an error that names both dims and both rules, also where
    the axis is optional and absent. (T5X and flax linen quietly take the next rule of the name, or none.) A name that
    is both a rule's and an axis of the mesh is an error too, unless the rule maps it to itself.

    Rules are part of what a traced function depends on: under other rules it is traced, completed and compiled anew.
    flax nnx places a parameter that has logical names when it is made; where flax is imported the block tells it these
    rules too.

    Example:
        >>> import sharding
        >>> with sharding.mesh(devices=8, data=2, tensor=4), sharding.axis_rules({"batch": "data", "mlp": "tensor"}):
        ...     str(sharding.logical.resolve(P("batch", "mlp"), (16, 64), {"data": 2, "tensor": 4}, asked="x"))
        '[data, tensor]'
    """
    pairs: tuple[Any, ...] = tuple(rules.items() if isinstance(rules, Mapping) else rules)
    optional = (optional,) if isinstance(optional, str) else tuple(optional)
    raise_together("sharding.axis_rules", list(_misfits(pairs, optional)))
    return AxisRules(pairs=pairs, optional=optional)


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisRules:
    """Rules that `with` puts in force, on top of those around."""

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
                stack.enter_context(flax.logical_axis_rules(_PlainPairs.over(flax.get_logical_axis_rules(), both)))
            _ENTERED.set((*_ENTERED.get(), stack.pop_all()))
        return both

    def __exit__(self, *exc_info: object) -> None:
        *outer, stack = _ENTERED.get()
        _ENTERED.set(tuple(outer))
        stack.close()

    def __str__(self) -> str:
        return ", ".join(f"{name} -> {_entry_text(entry)}" for name, entry in self.pairs) or "(none)"


_CONTEXT = jax.make_user_context(AxisRules(pairs=()))  # in the cache key of every trace, our own and `jax.jit`'s
_ENTERED: ContextVar[tuple[ExitStack, ...]] = ContextVar("sharding.axis_rules", default=())


def in_force() -> AxisRules:
    """The rules of all blocks around; without any an empty table."""
    return _CONTEXT.value


def resolve(spec: P, shape: tuple[int, ...], sizes: Mapping[str, int], *, asked: str, priority: int = 0) -> Spec:
    """The `Spec` of a `PartitionSpec` that may hold logical names.

    Args:
        spec: what a user wrote.
        shape: of the array.
        sizes: of the mesh axes that it may name.
        asked: the request, for errors.
        priority: of every dim.

    Raises:
        ShardingError: as `from_partition_spec`; a name that is no axis and no rule's, or both; a rule that names no
            axis; a mesh axis that two dims would get.
    """
    rules = in_force()
    if not rules.pairs or not isinstance(spec, P):
        return from_partition_spec(spec, shape, sizes, asked=asked, priority=priority)
    reader = _Reader(rules, sizes)
    faults, fixes = reader.faults(spec)
    if faults:
        raise ShardingError(
            asked,
            there=[f"spec {spec}, mesh axes {sizes_text(sizes)}", f"axis rules {rules}", *faults],
            must="a name is an axis of the mesh or has a rule whose axes the mesh has; "
            "each mesh axis splits at most one dim of an array",
            fix=fixes,
        )
    plain = P(*map(reader.entry, spec), unreduced=spec.unreduced, reduced=spec.reduced)
    found = from_partition_spec(plain, shape, sizes, asked=asked, priority=priority)
    via = [reader.via(e) for e in spec] + [""] * (len(shape) - len(spec))
    dims = (dataclasses.replace(d, via=v) for d, v in zip(found.dims, via, strict=True))
    return dataclasses.replace(found, dims=tuple(dims))


@dataclass(frozen=True, slots=True)
class _Reader:
    """One table read on one mesh."""

    rules: AxisRules
    sizes: Mapping[str, int]

    def rule(self, name: Any) -> Entry:
        """What a name stands for: the name itself if it has no rule."""
        return next((entry for n, entry in self.rules.pairs if n == name), name) if isinstance(name, str) else name

    def known(self, name: str) -> bool:
        return any(n == name for n, _ in self.rules.pairs)

    def lacking(self, axis: Any) -> bool:
        return isinstance(axis, str) and axis not in self.sizes and axis in self.rules.optional

    def entry(self, entry: Entry) -> Entry:
        """A dim's entry with every name replaced and absent optional axes left out."""
        items = [a for part in _parts(entry) for a in _parts(self.rule(part)) if not self.lacking(a)]
        if not items:
            return None
        return items[0] if len(items) == 1 and items[0] is not Ellipsis else tuple(items)

    def via(self, entry: Entry) -> str:
        """The rules that a dim's entry took, as text."""
        used = [f"{n} -> {_entry_text(self.rule(n))}" for n in _names(entry) if self.known(n)]
        return ", ".join(used)

    def faults(self, spec: P) -> tuple[list[str], list[str]]:
        """What is wrong with the names in a spec, and what to try."""
        faults: dict[str, str] = {}
        holders: dict[str, tuple[int, str]] = {}
        for dim, entry in enumerate(spec):
            for name in _names(entry):
                found = self.misread(dim, name)
                faults.update([found] if found else [])
                for axis in _names(self.rule(name)):
                    at = holders.setdefault(axis, (dim, name))
                    if at != (dim, name) and (self.known(name) or self.known(at[1])):
                        line = f"{self.claim(*at)} and {self.claim(dim, name)}: both would be split by {axis!r}"
                        faults[line] = f"another axis for one of {at[1]!r} and {name!r}, or None in the spec"
        return list(faults), list(dict.fromkeys(faults.values()))

    def claim(self, dim: int, name: str) -> str:
        return f"dim {dim} {name!r}" + (f" (rule {self.via(name)})" if self.known(name) else "")

    def misread(self, dim: int, name: str) -> tuple[str, str] | None:
        """Why a name can't be read, and what to try."""
        rule, axes = self.rule(name), list(self.sizes)
        if self.known(name) and name in self.sizes and rule != name:
            return (
                f"dim {dim} {name!r} is both an axis of the mesh and the name of a rule ({self.via(name)})",
                f"another name for the rule {name!r}",
            )
        if not self.known(name) and name not in self.sizes:
            names = [n for n, _ in self.rules.pairs]
            near = difflib.get_close_matches(name, [*axes, *names], n=1, cutoff=0.5)
            fix = f"{near[0]!r} in place of {name!r}" if near else f"a rule for {name!r} in sharding.axis_rules(...)"
            return f"dim {dim} {name!r} is neither an axis of the mesh nor the name of a rule", fix
        absent = [a for a in _names(rule) if a not in self.sizes and a not in self.rules.optional]
        if not absent:
            return None
        near = difflib.get_close_matches(absent[0], axes, n=1, cutoff=0.6)
        fix = f"{near[0]!r} in place of {absent[0]!r}" if near else f"sharding.mesh(..., {absent[0]}=1)"
        missing = ", ".join(map(repr, absent))
        return (
            f"dim {dim} {name!r} has the rule {self.via(name)}, and the mesh has no axis {missing}",
            f"{fix}, or optional=({absent[0]!r},) for rules that serve other meshes too",
        )


@dataclass(frozen=True, slots=True)
class _PlainPairs:
    """The rules as flax reads them: pairs, each worth what it is on the mesh in force when flax asks."""

    rules: AxisRules
    own: tuple[tuple[str, Entry], ...]
    """What flax had been told before."""

    @staticmethod
    def over(outer: Any, rules: AxisRules) -> _PlainPairs:
        own = outer.own if isinstance(outer, _PlainPairs) else tuple(outer)
        return _PlainPairs(rules, tuple((n, e) for n, e in own if n not in dict(rules.pairs)))

    def __len__(self) -> int:
        return len(self.own) + len(self.rules.pairs)

    def __iter__(self) -> Iterator[tuple[str, Entry]]:
        yield from self.own
        mesh = current()
        reader = _Reader(self.rules, dict(mesh.shape) if mesh is not None else {})
        for name, _ in self.rules.pairs:
            axes = tuple(a for a in _parts(reader.entry(name)) if isinstance(a, str))
            yield name, axes[0] if len(axes) == 1 else axes or None


def _parts(entry: Entry) -> tuple[Any, ...]:
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def _names(entry: Entry) -> list[str]:
    return [a for a in _parts(entry) if isinstance(a, str)]


def _entry_text(entry: Entry) -> str:
    if entry is None or entry == ():
        return "whole"
    words = [a if isinstance(a, str) else "..." if a is Ellipsis else "open" for a in _parts(entry)]
    return words[0] if len(words) == 1 else f"({', '.join(words)})"


def _misfits(pairs: Sequence[Any], optional: Sequence[Any]) -> Iterator[ShardingError]:
    must = "a rule is a name and what it stands for: a mesh axis, a tuple of them, None or P.UNCONSTRAINED"
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str) or not _is_entry(pair[1]):
            text = f"{pair[0]!r}: {pair[1]!r}" if isinstance(pair, tuple) and len(pair) == 2 else repr(pair)
            yield ShardingError("sharding.axis_rules(...)", there=text, must=must, fix='{"batch": ("data", "fsdp")}')
    names = [pair[0] for pair in pairs if isinstance(pair, tuple) and pair]
    twice = [n for i, n in enumerate(names) if isinstance(n, str) and n in names[:i]]
    for name in dict.fromkeys(twice):
        values = [_entry_text(e) for n, e in pairs if n == name]
        yield ShardingError(
            f"sharding.axis_rules(...): {name!r}",
            there=f"rules {' and '.join(f'{name} -> {v}' for v in values)}",
            must="a name has one rule",
            fix=f"two names, or a tuple: {name!r}: ({', '.join(repr(v) for v in values)})",
        )
    if not all(isinstance(a, str) for a in optional):
        yield ShardingError(f"sharding.axis_rules(optional={optional!r})", must="names of mesh axes", fix="('fsdp',)")


def _is_entry(entry: Entry) -> bool:
    fine = [isinstance(a, str) or a is P.UNCONSTRAINED or a is Ellipsis for a in _parts(entry)]
    names = _names(entry)
    return all(fine) and entry is not Ellipsis and len(set(names)) == len(names)
