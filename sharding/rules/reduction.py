"""Factor rules of reductions and cumulative ops."""

from __future__ import annotations

from collections.abc import Sequence

from .rule import Kind, Rule, RuleBuilder, Shape
from .shape import Params


def reduce(ins: Sequence[Shape], outs: Sequence[Shape], params: Params) -> Rule:
    """Dims in `axes` are reduced, the others pass through; arrays of one shape share all factors, scalars have none."""
    axes = params["axes"] if "axes" in params else params["dimensions"]
    shape = ins[0]
    rule, out = RuleBuilder(ins, outs), 0
    for d, size in enumerate(shape):
        at = [d if s == shape and s else None for s in ins]
        rule.factor(at, [None if d in axes else out] * len(outs), size, Kind.REDUCE if d in axes else Kind.PASS)
        out += d not in axes
    return rule.build()


def cumulative(ins: Sequence[Shape], outs: Sequence[Shape], params: Params) -> Rule:
    """The cumulative dim sends partial results between neighbours; the others pass through."""
    rule = RuleBuilder(ins, outs)
    for d, size in enumerate(ins[0]):
        rule.everywhere(d, size, Kind.PERMUTE if d == params["axis"] else Kind.PASS)
    return rule.build()
