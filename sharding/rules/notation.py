"""Factor rules as text: `"b i k, b k j -> b i j"`, one name per factor.

Arrays are parted by commas, dims by spaces, operands from results by `->`. `(i j)` is a dim that is the product of two
factors, major first; `...` is any number of leading dims that all arrays with a `...` share; `1` is a dim that belongs
to no other. A factor that no result has is a reduction unless it is said to be something else. The notation is that of
`jax.experimental.custom_partitioning`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import ShardingError, raise_together
from .rule import Flow, Kind, Rule, Shape

Names = tuple[str, ...]
"""The factors of one dim, major first; none for `1`."""

_TOKEN = re.compile(r"\.\.\.|\(([^()]*)\)|[A-Za-z_]\w*|1|\S+")
_NAME = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Array:
    """One array of a notation."""

    dims: tuple[Names, ...]
    leading: bool
    """Whether it begins with `...`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notation:
    """A rule for arrays of any shapes that fit it."""

    text: str
    operands: tuple[Array, ...]
    results: tuple[Array, ...]
    kinds: Mapping[str, Kind] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Sizes that the shapes do not tell, of factors that occur in products only."""

    def rule(self, ins: Sequence[Shape], outs: Sequence[Shape]) -> Rule:
        """The rule at given shapes.

        Raises:
            ShardingError: another number of arrays or dims, or factors whose sizes disagree; all of them together.
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

    def _check_counts(self, ins: Sequence[Shape], outs: Sequence[Shape]) -> None:
        wrong = [
            f"{len(there)} {what}, the rule has {len(asked)}"
            for what, asked, there in (("operands", self.operands, ins), ("results", self.results, outs))
            if len(asked) != len(there)
        ]
        pairs = [] if wrong else list(zip((*self.operands, *self.results), (*ins, *outs), strict=True))
        for i, (array, shape) in enumerate(pairs):
            if len(shape) < len(array.dims) or (len(shape) > len(array.dims) and not array.leading):
                which = f"operand {i}" if i < len(ins) else f"result {i - len(ins)}"
                wrong.append(f"{which} has {len(shape)} dims {shape}, the rule has {len(array.dims)}")
        if wrong:
            raise ShardingError(
                f"rule {self.text!r}", there=wrong, must="a rule has one entry for each dim of each operand and result"
            )

    def _dims(self, array: Array, shape: Shape, leading: int) -> list[Names]:
        """Per dim the factors, `...` spelled out from the minor side; a dim written `1` gets a factor of its own."""
        have = len(shape) - len(array.dims)
        front = [(f"...{leading - have + d}",) for d in range(have)]
        return front + [names or (f"1 of {id(array)} at {d}",) for d, names in enumerate(array.dims)]

    def _sizes(self, dims: Sequence[Sequence[Names]], shapes: Sequence[Shape]) -> dict[str, int]:
        sizes = {n: 0 for array in dims for names in array for n in names}
        sizes |= {n: size for n, size in self.sizes.items() if n in sizes}
        placed = [
            (names, n) for array, shape in zip(dims, shapes, strict=True) for names, n in zip(array, shape, strict=True)
        ]
        for names, size in sorted(placed, key=lambda p: len(p[0])):  # single factors tell the sizes of products
            unknown = [n for n in names if not sizes[n]]
            known = math.prod(sizes[n] for n in names if sizes[n])
            if len(unknown) == 1 and size % max(known, 1) == 0:
                sizes[unknown[0]] = size // known
        wrong = [text for names, size in placed if (text := _disagreement(names, size, sizes))]
        if wrong:
            raise ShardingError(
                f"rule {self.text!r} at shapes {', '.join(map(str, shapes))}",
                there=list(dict.fromkeys(wrong)),
                must="a factor has one size wherever it occurs, and the factors of a dim multiply up to it",
            )
        return sizes


def _disagreement(names: Names, size: int, sizes: Mapping[str, int]) -> str:
    """What is wrong with a dim of so many elements; empty if it is what its factors multiply up to."""
    known = {n: sizes[n] for n in names if sizes[n]}
    product = math.prod(known.values())
    text = " * ".join(f"{n}={k}" for n, k in known.items())
    if product == size or not size:
        return "" if len(known) == len(names) else f"nothing tells the sizes of {_list(names, known)}"
    if len(known) == len(names):
        return f"{text}{f' = {product}' if len(names) > 1 else ''}, but the dim has {size}"
    return (
        f"{text} does not divide a dim of {size}"
        if size % product
        else f"nothing tells the sizes of {_list(names, known)}"
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
    """A rule from its text.

    Args:
        text: as in the head of this file.
        reduction: factors whose split leaves partial results to be summed; by default those that no result has.
        permutation: factors whose split makes neighbours exchange borders.
        need_replication: factors that have to be whole inside the op.
        sizes: the sizes of factors that occur in products only.

    Raises:
        ShardingError: whatever is malformed, all of it together.
    """
    sides = text.split("->")
    failures = (
        [] if len(sides) == 2 else [_fault(text, f"{len(sides) - 1} arrows", "one -> between operands and results")]
    )
    arrays = [tuple(_array(part, text, failures) for part in side.split(",")) if side.strip() else () for side in sides]
    known = dict.fromkeys(n for side in arrays for a in side for names in a.dims for n in names)
    kinds: dict[str, Kind] = {}
    asked = (reduction, Kind.REDUCE), (permutation, Kind.PERMUTE), (need_replication, Kind.REPLICATE)
    for names, kind in asked:
        for name in names:
            if name not in known:
                failures.append(
                    _fault(text, f"{kind.value} factor {name!r}", f"a factor of the rule: {', '.join(known)}")
                )
            elif kinds.setdefault(name, kind) is not kind:
                failures.append(
                    _fault(text, f"{name!r} is {kinds[name].value} and {kind.value}", "one kind per factor")
                )
    for name, size in (sizes or {}).items():
        if name not in known or size < 1:
            failures.append(_fault(text, f"size {name}={size}", "a positive size of a factor of the rule"))
    raise_together(f"rule {text!r}", failures)
    return Notation(text=text, operands=arrays[0], results=arrays[1], kinds=kinds, sizes=dict(sizes or {}))


def from_sdy(rule: Any) -> Notation:
    """The rule that an author gave to `custom_partitioning`, an `SdyShardingRule`; factors pass unless it says else."""

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
                failures.append(_fault(text, f"... after {part.split()[i - 1]!r}", "... in front of the other dims"))
        elif word == "1":
            dims.append(())
        elif word.startswith("(") and token.group(1) is not None:
            dims.append(tuple(token.group(1).split()))
        else:
            dims.append((word,))
    names = [n for d in dims for n in d]
    failures += [_fault(text, repr(n), "factors are names, as in 'b i k'") for n in names if not _NAME.fullmatch(n)]
    twice = sorted({n for n in names if names.count(n) > 1})
    failures += [_fault(text, f"{n!r} twice in {part.strip()!r}", "a factor is once in an array") for n in twice]
    return Array(dims=tuple(dims), leading=leading)


def _fault(text: str, there: str, must: str) -> ShardingError:
    return ShardingError(f"rule {text!r}", there=there, must=must)
