"""Factor rules of dot products and convolutions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from .rule import Kind, Rule, RuleBuilder, Shape
from .shape import Params


def dot_general(ins: Sequence[Shape], outs: Sequence[Shape], params: Params) -> Rule:
    """`"b i k, b k j -> b i j"`: batch and free dims pass through, contracting dims are reduced."""
    numbers = params["dimension_numbers"]
    rule, none = RuleBuilder(ins, outs), [None] * (len(ins) - 2)
    _outer(rule, numbers, lambda i, j: none)
    for i, j in zip(*numbers[0], strict=True):
        rule.factor([i, j, *none], [None], ins[0][i], Kind.REDUCE)
    return rule.build()


def _outer(
    rule: RuleBuilder,
    numbers: Any,
    others: Callable[[int | None, int | None], Sequence[int | None]],
    *,
    first: int = 0,
    groups: Sequence[int] = (),
) -> None:
    """Adds the factors that the result of a product has: batch dims, then the free dims of lhs and of rhs.

    `others` returns the dims of the operands after lhs and rhs, `first` is the first result dim; rhs dims in `groups`
    are not free.
    """
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = numbers
    lhs, rhs = rule.operand_shapes[:2]
    left = [i for i in range(len(lhs)) if i not in lhs_contract and i not in lhs_batch]
    right = [j for j in range(len(rhs)) if j not in rhs_contract and j not in rhs_batch and j not in groups]
    pairs = [*zip(lhs_batch, rhs_batch, strict=True), *((i, None) for i in left), *((None, j) for j in right)]
    for out, (i, j) in enumerate(pairs, first):
        rule.factor([i, j, *others(i, j)], [out], lhs[i] if i is not None else rhs[j])


def ragged_dot_general(ins: Sequence[Shape], outs: Sequence[Shape], params: Params) -> Rule:
    """`dot_general` per group: free and batch dims pass through; contracting dims and rhs group dims are reduced.

    If the groups divide a contracting dim, the result has a leading group dim; if they divide a free dim, every
    device sees all of it. Group offsets depend on all group sizes, so the sizes are replicated.
    """
    numbers = params["ragged_dot_dimension_numbers"]
    contract, _ = numbers.dot_dimension_numbers
    (ragged,), groups = numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions
    lhs, _, sizes, *rest = ins
    rule, none = RuleBuilder(ins, outs), [None] * len(rest)
    last = len(sizes) - 1
    rule.factor([None, None, last, *none], [None], sizes[last], Kind.REPLICATE, blocked=True)
    if groups:
        rule.factor([None, groups[0], None, *none], [None], sizes[last], Kind.REDUCE)
    first = 1 if ragged in contract[0] else 0
    _outer(rule, numbers.dot_dimension_numbers, lambda i, j: [None, *none], first=first, groups=groups)
    for i, j in zip(*contract, strict=True):
        rule.factor([i, j, None, *none], [None], lhs[i], Kind.REDUCE)
    return rule.build()


def conv_general_dilated(ins: Sequence[Shape], outs: Sequence[Shape], params: Params) -> Rule:
    """Batch and output features pass through, input features are reduced, spatial dims exchange halos.

    A spatial dim has two factors, windows (result) and positions within a window (kernel); the larger is major.
    """
    dims, (lhs, rhs), (out,) = params["dimension_numbers"], ins, outs
    batch, feature, *space = dims.lhs_spec
    out_feature, in_feature, *kernel = dims.rhs_spec
    out_batch, out_channel, *out_space = dims.out_spec
    batch_groups, groups = params["batch_group_count"], params["feature_group_count"]
    rule = RuleBuilder(ins, outs)
    if batch_groups > 1:
        rule.factor([batch, out_feature], [out_channel], batch_groups)
    rule.factor([batch, None], [out_batch], out[out_batch])
    for i, k, o in zip(space, kernel, out_space, strict=True):
        left, has_own = lhs[i], True
        windows = (out[o], [i, None], [o], Kind.PERMUTE)
        within = (rhs[k], [i, k], [None], Kind.REDUCE)
        for size, at, to, kind in sorted((windows, within), key=lambda part: -part[0]):
            if min(left, size) > 1:
                rule.factor(at, to, min(left, size), kind)
                left //= min(left, size)
                has_own = has_own and at[1] is None
        if has_own:
            rule.factor([None, k], [None], rhs[k], Kind.REPLICATE)
    if groups > 1:
        rule.factor([feature, out_feature], [out_channel], groups)
    rule.factor([feature, in_feature], [None], rhs[in_feature], Kind.REDUCE)
    features = out[out_channel] // (batch_groups * groups)
    if features > 1:
        rule.factor([None, out_feature], [out_channel], features)
    return rule.build()


def scaled_dot(ins: Sequence[Shape], outs: Sequence[Shape], params: Params) -> Rule:
    """`dot_general` of lhs and rhs with scales, each shared by a block of elements along the contracting dims."""
    numbers = params["dimension_numbers"]
    lhs, _, lhs_scale, rhs_scale = ins
    rule = RuleBuilder(ins, outs)
    _outer(rule, numbers, lambda i, j: [i, j])
    for i, j in zip(*numbers[0], strict=True):
        blocks = math.gcd(lhs_scale[i], rhs_scale[j])
        rule.factor([i, j, i, j], [None], blocks, Kind.REDUCE)
        rule.factor([i, j, None, None], [None], lhs[i] // blocks, Kind.REDUCE)
    return rule.build()
