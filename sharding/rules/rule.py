"""Factor rules: which dims of an op's operands and results correspond.

Every dim is a product of *factors*, major to minor; dims that share a factor are sharded over the same axes.
`dot_general` is `"b i k, b k j -> b i j"`, where `k` is a reduction. Notation and kinds follow Shardy's sharding rules
(openxla/shardy, `docs/sharding_representation.md`).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

Shape = tuple[int, ...]
Dims = tuple[tuple[int, ...], ...]
"""For each dim of one array, the indices of its factors, major to minor."""


class Kind(enum.Enum):
    """What an op must communicate along a sharded factor."""

    PASS = "pass-through"
    REDUCE = "reduction"
    PERMUTE = "permutation"
    REPLICATE = "need-replication"


class Flow(enum.Enum):
    """Op class that sets the priority and direction of propagation (Shardy's op priorities)."""

    ELEMENTWISE = "elementwise"
    MOVE = "data movement"
    SLICE = "slice"
    BROADCAST = "broadcast"
    OTHER = "other"
    FORWARD = "forward only"
    """From operands to results only, at every priority: a barrier."""
    BACKWARD = "backward only"
    """From results to operands only, at every priority: a barrier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The factor rule of an op at given shapes."""

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    sizes: tuple[int, ...]
    """The size of each factor."""
    kinds: tuple[Kind, ...]
    blocked: frozenset[int] = frozenset()
    """Factors along which shardings do not propagate."""
    flow: Flow = Flow.OTHER
    is_opaque: bool = False
    """Whether nothing is known of the op, which therefore runs on replicated arrays."""

    def __str__(self) -> str:
        names = "ijklmnopqrstuvwxyzabcdefgh"

        def text(arrays: tuple[Dims, ...]) -> str:
            return ", ".join(" ".join("".join(names[f % 26] for f in d) or "1" for d in dims) for dims in arrays)

        return f"{text(self.operands)} -> {text(self.results)}"


@dataclass(slots=True)
class RuleBuilder:
    """Builds a rule factor by factor; a dim of `None` means that the array does not have the factor."""

    operand_shapes: Sequence[Shape]
    result_shapes: Sequence[Shape]
    sizes: list[int] = field(default_factory=list)
    kinds: list[Kind] = field(default_factory=list)
    blocked: set[int] = field(default_factory=set)
    dims: list[list[list[int]]] = field(init=False)

    def __post_init__(self) -> None:
        self.dims = [[[] for _ in shape] for shape in (*self.operand_shapes, *self.result_shapes)]

    def factor(
        self,
        operand_dims: Sequence[int | None],
        result_dims: Sequence[int | None],
        size: int,
        kind: Kind = Kind.PASS,
        *,
        blocked: bool = False,
    ) -> None:
        """Adds a factor as the next-minor part of the given dims."""
        index = len(self.sizes)
        self.sizes.append(size)
        self.kinds.append(kind)
        if blocked:
            self.blocked.add(index)
        for array, dim in zip(self.dims, (*operand_dims, *result_dims), strict=True):
            if dim is not None and not (size == 1 and array[dim]):
                array[dim].append(index)

    def everywhere(self, dim: int, size: int, kind: Kind = Kind.PASS, *, blocked: bool = False) -> None:
        """Adds a factor for the same dim of every non-scalar array."""
        at = [dim if array else None for array in self.dims]
        n = len(self.operand_shapes)
        self.factor(at[:n], at[n:], size, kind, blocked=blocked)

    def build(self, flow: Flow = Flow.OTHER) -> Rule:
        """Returns the rule; every dim without a factor gets its own."""
        for array, shape in zip(self.dims, (*self.operand_shapes, *self.result_shapes), strict=True):
            for d, factors in enumerate(array):
                if not factors:
                    factors.append(len(self.sizes))
                    self.sizes.append(shape[d])
                    self.kinds.append(Kind.PASS)
        arrays = tuple(tuple(tuple(f) for f in array) for array in self.dims)
        n = len(self.operand_shapes)
        return Rule(
            operands=arrays[:n],
            results=arrays[n:],
            sizes=tuple(self.sizes),
            kinds=tuple(self.kinds),
            blocked=frozenset(self.blocked),
            flow=flow,
        )


def opaque(operand_shapes: Sequence[Shape], result_shapes: Sequence[Shape]) -> Rule:
    """Returns the rule of an op of which nothing is known: it runs on replicated arrays, and no sharding passes it."""
    rule = RuleBuilder(operand_shapes, result_shapes).build()
    count = len(rule.sizes)
    return replace(rule, kinds=(Kind.REPLICATE,) * count, blocked=frozenset(range(count)), is_opaque=True)


def pointwise(operand_shapes: Sequence[Shape], result_shapes: Sequence[Shape], flow: Flow = Flow.ELEMENTWISE) -> Rule:
    """Returns the rule in which dim i of every array is factor i, except in scalars and broadcast dims of size 1."""
    shapes = (*operand_shapes, *result_shapes)
    shape = max(shapes, key=lambda s: (len(s), math.prod(s)))
    sizes = list(shape)

    def dims(own: Shape) -> Dims:
        factors = []
        for i, size in enumerate(own):
            if size != shape[i]:
                sizes.append(size)
            factors.append((i if size == shape[i] else len(sizes) - 1,))
        return tuple(factors)

    arrays = [dims(s) for s in shapes]
    n = len(operand_shapes)
    return Rule(
        operands=tuple(arrays[:n]),
        results=tuple(arrays[n:]),
        sizes=tuple(sizes),
        kinds=(Kind.PASS,) * len(sizes),
        flow=flow,
    )
