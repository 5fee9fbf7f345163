"""Factor rules of ops that transpose, reshape, broadcast, concatenate, slice or pad arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .rule import Flow, Kind, Rule, RuleBuilder, Shape

Params = Mapping[str, Any]


def broadcast_in_dim(ins: Sequence[Shape], outs: Sequence[Shape], params: Params) -> Rule:
    """Mapped dims of equal size share a factor; new and broadcast dims are factors of the result alone."""
    rule = RuleBuilder(ins, outs)
    source = {out: i for i, out in enumerate(params["broadcast_dimensions"])}
    for out_dim, size in enumerate(outs[0]):
        in_dim = source.get(out_dim)
        if in_dim is not None and ins[0][in_dim] == 1 != size:
            rule.factor([in_dim, *_none(ins[1:])], [None], 1)
            in_dim = None
        rule.factor([in_dim, *_none(ins[1:])], [out_dim], size)
    return rule.build(Flow.BROADCAST)


def transpose(ins: Sequence[Shape], outs: Sequence[Shape], params: Params) -> Rule:
    """Result dim i is operand dim `permutation[i]`."""
    rule = RuleBuilder(ins, outs)
    for out_dim, in_dim in enumerate(params["permutation"]):
        rule.factor([in_dim], [out_dim], ins[0][in_dim])
    return rule.build(Flow.MOVE)


def reshape(ins: Sequence[Shape], outs: Sequence[Shape], params: Params) -> Rule | None:
    """Walks both shapes from the major side and assigns greatest common factors.

    8x4 -> 2x16 is `(ij) k -> i (jk)`. Without a common factor, each side gets its own until their products agree again.
    """
    del params
    (a, *rest), (b,) = ins, outs
    if math.prod(a) == 0:
        return None
    rule = RuleBuilder(ins, outs)
    none = _none(rest)
    i = j = 0
    left, right = 1, 1  # unassigned sizes of the current dims
    debt_in = debt_out = 1  # products of the factors since the two sides last agreed
    while i < len(a) or j < len(b) or left > 1 or right > 1:
        if left == 1 and i < len(a):
            if a[i] == 1:
                rule.factor([i, *none], [None], 1)
                i += 1
                continue
            left, i = a[i], i + 1
        if right == 1 and j < len(b):
            if b[j] == 1:
                rule.factor([None, *none], [j], 1)
                j += 1
                continue
            right, j = b[j], j + 1
        if debt_in == debt_out == 1:
            common = math.gcd(left, right)
            if common > 1:
                rule.factor([i - 1, *none], [j - 1], common)
                left, right = left // common, right // common
            else:
                rule.factor([i - 1, *none], [None], left)
                rule.factor([None, *none], [j - 1], right)
                debt_in, debt_out, left, right = left, right, 1, 1
        elif debt_in < debt_out:
            step = _catch_up(left, right, debt_in, debt_out)
            rule.factor([i - 1, *none], [None], step)
            debt_in, left = debt_in * step, left // step
        else:
            step = _catch_up(right, left, debt_out, debt_in)
            rule.factor([None, *none], [j - 1], step)
            debt_out, right = debt_out * step, right // step
        if debt_in == debt_out:
            debt_in = debt_out = 1
    return rule.build(Flow.MOVE)


def _catch_up(mine: int, other: int, behind: int, ahead: int) -> int:
    if ahead % behind == 0 and mine % (ahead // behind) == 0:
        return ahead // behind
    common = math.gcd(mine, other)
    return mine // common if mine > common else mine


def slice_or_pad(ins: Sequence[Shape], outs: Sequence[Shape], params: Params) -> Rule:
    """Dims of unchanged size pass through; sliced or padded dims shift data between neighbours."""
    del params
    rule = RuleBuilder(ins, outs)
    for d, (size, out_size) in enumerate(zip(ins[0], outs[0], strict=True)):
        rule.factor([d, *_none(ins[1:])], [d], size, Kind.PASS if size == out_size else Kind.PERMUTE)
    return rule.build()


def rev(ins: Sequence[Shape], outs: Sequence[Shape], params: Params) -> Rule:
    """Reversed dims exchange shards."""
    rule = RuleBuilder(ins, outs)
    for d, size in enumerate(ins[0]):
        rule.everywhere(d, size, Kind.PERMUTE if d in params["dimensions"] else Kind.PASS)
    return rule.build()


def concatenate(ins: Sequence[Shape], outs: Sequence[Shape], params: Params) -> Rule:
    """All dims pass through except the concatenated one, which must be replicated."""
    rule = RuleBuilder(ins, outs)
    for d, size in enumerate(outs[0]):
        rule.everywhere(d, size, Kind.REPLICATE if d == params["dimension"] else Kind.PASS)
    return rule.build()


def split(ins: Sequence[Shape], outs: Sequence[Shape], params: Params) -> Rule:
    """All dims pass through except the split one, which shifts data between neighbours."""
    rule = RuleBuilder(ins, outs)
    for d, size in enumerate(ins[0]):
        rule.everywhere(d, size, Kind.PERMUTE if d == params["axis"] and len(outs) > 1 else Kind.PASS)
    return rule.build()


def stack(ins: Sequence[Shape], outs: Sequence[Shape], params: Params) -> Rule:
    """The new dim is a factor of the result alone and must be replicated; the others pass through."""
    rule, axis = RuleBuilder(ins, outs), params["axis"]
    rule.factor(_none(ins), [axis], outs[0][axis], Kind.REPLICATE)
    for d, size in enumerate(ins[0]):
        rule.factor([d] * len(ins), [d + (d >= axis)], size)
    return rule.build()


def unstack(ins: Sequence[Shape], outs: Sequence[Shape], params: Params) -> Rule:
    """Inverse of `stack`: the removed dim is a factor of the operand alone and must be replicated."""
    rule, axis = RuleBuilder(ins, outs), params["axis"]
    rule.factor([axis], _none(outs), ins[0][axis], Kind.REPLICATE)
    for d in range(len(ins[0]) - 1):
        in_dim = d + (d >= axis)
        rule.factor([in_dim], [d] * len(outs), ins[0][in_dim])
    return rule.build()


def tile(ins: Sequence[Shape], outs: Sequence[Shape], params: Params) -> Rule:
    """A tiled dim has two factors: the repeats, which only the result has and are major, and the operand's dim."""
    rule = RuleBuilder(ins, outs)
    for d, (repeats, size) in enumerate(zip(params["reps"], ins[0], strict=True)):
        if repeats != 1:
            rule.factor([None], [d], repeats)
        rule.factor([d], [d], size)
    return rule.build(Flow.BROADCAST)


def bitcast_convert_type(ins: Sequence[Shape], outs: Sequence[Shape], params: Params) -> Rule:
    """Dims pass through; an innermost dim that is added or removed must be replicated."""
    del params
    rule = RuleBuilder(ins, outs)
    ndim = min(len(ins[0]), len(outs[0]))
    for d in range(ndim):
        rule.everywhere(d, ins[0][d])
    if len(ins[0]) > ndim:
        rule.factor([ndim], [None], ins[0][ndim], Kind.REPLICATE)
    if len(outs[0]) > ndim:
        rule.factor([None], [ndim], outs[0][ndim], Kind.REPLICATE)
    return rule.build(Flow.ELEMENTWISE if len(ins[0]) == len(outs[0]) else Flow.OTHER)


def iota(ins: Sequence[Shape], outs: Sequence[Shape], params: Params) -> Rule:
    """Each device generates its own shard."""
    del params
    return RuleBuilder(ins, outs).build()


def _none(shapes: Sequence[Shape]) -> list[None]:
    return [None] * len(shapes)
