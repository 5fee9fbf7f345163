"""Text notation of factor rules: `"b i k, b k j -> b i j"`, one name per factor.

Commas separate arrays, spaces separate dims, `->` separates operands from results. `(i j)` is a dim with two factors,
major first; `...` is any number of leading dims, shared by all arrays with a `...`; `1` is a dim that corresponds to no
other. A factor that no result has is a reduction unless given another kind. The notation is that of
`jax.experimental.custom_partitioning`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import ShardingError, raise_together
from .rule import Flow, Kind, Rule, Shape

Names = tuple[str, ...]
"""The factors of one dim, major first; none for `1`."""

_TOKEN = re.compile(r"\.\.\.|\(([^()]*)\)|[A-Za-z_]\w*|1|\S+")
_NAME = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Array:
    """Notation of one operand or result."""

    dims: tuple[Names, ...]
    leading: bool
    """Whether it begins with `...`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notation:
    """A parsed rule, applicable to any shapes that fit it."""

    text: str
    operands: tuple[Array, ...]
    results: tuple[Array, ...]
    kinds: Mapping[str, Kind] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Sizes of factors that occur in products only, which the shapes do not determine."""

    def rule(self, ins: Sequence[Shape], outs: Sequence[Shape]) -> Rule:
        """Returns the rule at given shapes.

        Raises:
            ShardingError: wrong numbers of arrays or dims, or inconsistent factor sizes, reported together.
        """
        arrays, shapes = (*self.operands, *self.results), (*ins, *outs)
        self._check_counts(ins, outs)
        leading = max((len(s) - len(a.dims) for a, s in zip(arrays, shapes, strict=True) if a.leading), default=0)
        dims = [self._dims(a, s, leading) for a, s in zip(arrays, shapes, strict=True)]
        sizes = self._sizes(dims, shapes)
        order = list(sizes)
        number = {name: i for i, name in enumerate(order)}
        found = tuple(tuple(tuple(number[n] for n in names) for names in array) for array in dims)
        results = {n for array in dims[len(ins) :] for names in array for n in names}
        kinds = tuple(self.kinds.get(n) or (Kind.PASS if n in results else Kind.REDUCE) for n in order)
        return Rule(
            operands=found[: len(ins)],
            results=found[len(ins) :],
            sizes=tuple(sizes.values()),
            kinds=kinds,
            blocked=frozenset(i for i, kind in enumerate(kinds) if kind is Kind.REPLICATE),
            flow=Flow.OTHER,
        )

    def at(self, ins: Sequence[Shape], outs: Sequence[Shape]) -> Notation:
        """Returns the notation for as many dims as given shapes have: without `...`, and with names for each `1`.

        A dim written `1` is replicated inside the op.

        Raises:
            ShardingError: as `rule`.
        """
        self.rule(ins, outs)
        arrays, shapes = (*self.operands, *self.results), (*ins, *outs)
        leading = max((len(s) - len(a.dims) for a, s in zip(arrays, shapes, strict=True) if a.leading), default=0)
        kinds, whole = dict(self.kinds), []
        for i, (a, s) in enumerate(zip(arrays, shapes, strict=True)):
            have = len(s) - len(a.dims)
            front = ((f"...{leading - have + d}",) for d in range(have))
            dims = [*front, *(names or (f"1 of {i} at {d}",) for d, names in enumerate(a.dims))]
            kinds |= {n: Kind.REPLICATE for d, names in enumerate(a.dims, have) if not names for n in dims[d]}
            whole.append(Array(dims=tuple(dims), leading=False))
        return replace(self, operands=tuple(whole[: len(ins)]), results=tuple(whole[len(ins) :]), kinds=kinds)

    def _check_counts(self, ins: Sequence[Shape], outs: Sequence[Shape]) -> None:
        wrong = [
            f"{len(shapes)} {what}, the rule has {len(arrays)}"
            for what, arrays, shapes in (("operands", self.operands, ins), ("results", self.results, outs))
            if len(arrays) != len(shapes)
        ]
        pairs = [] if wrong else list(zip((*self.operands, *self.results), (*ins, *outs), strict=True))
        for i, (array, shape) in enumerate(pairs):
            if len(shape) < len(array.dims) or (len(shape) > len(array.dims) and not array.leading):
                which = f"operand {i}" if i < len(ins) else f"result {i - len(ins)}"
                wrong.append(f"{which} has {len(shape)} dims {shape}, the rule has {len(array.dims)}")
        if wrong:
            raise ShardingError(
                f"rule {self.text!r}",
                found=wrong,
                required="one entry for each dim of each operand and result",
            )

    def _dims(self, array: Array, shape: Shape, leading: int) -> list[Names]:
        """Returns the factors of each dim, with `...` expanded from the minor side and a factor for each `1`."""
        have = len(shape) - len(array.dims)
        front = [(f"...{leading - have + d}",) for d in range(have)]
        return front + [names or (f"1 of {id(array)} at {d}",) for d, names in enumerate(array.dims)]

    def _sizes(self, dims: Sequence[Sequence[Names]], shapes: Sequence[Shape]) -> dict[str, int]:
        order = dict.fromkeys(n for array in dims for names in array for n in names)
        sizes = {n: size for n, size in self.sizes.items() if n in order}
        placed = [
            (names, n) for array, shape in zip(dims, shapes, strict=True) for names, n in zip(array, shape, strict=True)
        ]
        for names, size in sorted(placed, key=lambda p: len(p[0])):  # single factors determine those in products
            unknown = [n for n in names if n not in sizes]
            known = math.prod(sizes[n] for n in names if n in sizes)
            if len(unknown) == 1 and size % max(known, 1) == 0:
                sizes[unknown[0]] = size // known
        wrong = [text for names, size in placed if (text := _disagreement(names, size, sizes))]
        if wrong:
            raise ShardingError(
                f"rule {self.text!r} at shapes {', '.join(map(str, shapes))}",
                found=list(dict.fromkeys(wrong)),
                required="one size per factor, and dims equal to the product of their factors",
            )
        return {n: sizes[n] for n in order}


def _disagreement(names: Names, size: int, sizes: Mapping[str, int]) -> str:
    """Describes the mismatch between a dim's size and the product of its factors; empty if they agree."""
    known = {n: sizes[n] for n in names if n in sizes}
    product = math.prod(known.values())
    text = " * ".join(f"{n}={k}" for n, k in known.items())
    if product == size:
        return "" if len(known) == len(names) else f"unknown sizes of factors {_list(names, known)}"
    if len(known) == len(names):
        return f"{text}{f' = {product}' if len(names) > 1 else ''}, but the dim has {size}"
    return (
        f"{text} does not divide a dim of {size}"
        if not product or size % product
        else f"unknown sizes of factors {_list(names, known)}"
    )


def _list(names: Names, known: Mapping[str, int]) -> str:
    return ", ".join(n for n in names if n not in known)


def parse(
    text: str,
    *,
    reduction: Iterable[str] = (),
    permutation: Iterable[str] = (),
    need_replication: Iterable[str] = (),
    sizes: Mapping[str, int] | None = None,
) -> Notation:
    """Parses a rule.

    Args:
        text: a rule in the notation above.
        reduction: factors that leave partial sums when sharded; by default those that no result has.
        permutation: factors along which neighbours exchange halos when sharded.
        need_replication: factors that must be replicated inside the op.
        sizes: sizes of factors that occur in products only.

    Raises:
        ShardingError: malformed text or options, all failures reported together.
    """
    sides = text.split("->")
    failures = (
        [] if len(sides) == 2 else [_error(text, f"{len(sides) - 1} arrows", "one -> between operands and results")]
    )
    arrays = [tuple(_array(part, text, failures) for part in side.split(",")) if side.strip() else () for side in sides]
    known = dict.fromkeys(n for side in arrays for a in side for names in a.dims for n in names)
    kinds: dict[str, Kind] = {}
    for names, kind in (reduction, Kind.REDUCE), (permutation, Kind.PERMUTE), (need_replication, Kind.REPLICATE):
        for name in names:
            if name not in known:
                failures.append(
                    _error(text, f"{kind.value} factor {name!r}", f"a factor of the rule: {', '.join(known)}")
                )
            elif kinds.setdefault(name, kind) is not kind:
                failures.append(
                    _error(text, f"{name!r} is {kinds[name].value} and {kind.value}", "one kind per factor")
                )
    for name, size in (sizes or {}).items():
        if name not in known or size < 1:
            failures.append(_error(text, f"size {name}={size}", "a positive size of a factor of the rule"))
    raise_together(f"rule {text!r}", failures)
    return Notation(text=text, operands=arrays[0], results=arrays[1], kinds=kinds, sizes=dict(sizes or {}))


def from_sdy(rule: Any) -> Notation:
    """Converts the `SdyShardingRule` of a `custom_partitioning`; factors pass through unless given another kind."""

    def array(mapping: Sequence[str | Sequence[str]]) -> Array:
        dims = [(d,) if isinstance(d, str) else tuple(d) for d in mapping]
        leading = bool(dims) and dims[0][:1] != () and dims[0][0].startswith("\N{HORIZONTAL ELLIPSIS}")
        return Array(dims=tuple(dims[leading:]), leading=leading)

    operands, results = ([array(m) for m in side] for side in (rule.operand_mappings, rule.result_mappings))
    kinds = {n: Kind.PASS for a in (*operands, *results) for names in a.dims for n in names}
    kinds |= dict.fromkeys(rule.reduction_factors, Kind.REDUCE)
    kinds |= dict.fromkeys(rule.permutation_factors, Kind.PERMUTE)
    kinds |= dict.fromkeys(rule.need_replication_factors, Kind.REPLICATE)
    return Notation(
        text=str(rule), operands=tuple(operands), results=tuple(results), kinds=kinds, sizes=dict(rule.factor_sizes)
    )


def _array(part: str, text: str, failures: list[ShardingError]) -> Array:
    dims: list[Names] = []
    leading = False
    for i, token in enumerate(_TOKEN.finditer(part)):
        word = token.group()
        if word == "...":
            leading = True
            if i:
                failures.append(_error(text, f"... after {part.split()[i - 1]!r}", "... before all other dims"))
        elif word == "1":
            dims.append(())
        elif word.startswith("(") and token.group(1) is not None:
            dims.append(tuple(token.group(1).split()))
        else:
            dims.append((word,))
    names = [n for d in dims for n in d]
    failures += [
        _error(text, repr(n), "factors that are names, as in 'b i k'") for n in names if not _NAME.fullmatch(n)
    ]
    twice = sorted({n for n in names if names.count(n) > 1})
    failures += [_error(text, f"{n!r} twice in {part.strip()!r}", "each factor at most once per array") for n in twice]
    return Array(dims=tuple(dims), leading=leading)


def _error(text: str, found: str, required: str) -> ShardingError:
    return ShardingError(f"rule {text!r}", found=found, required=required)
