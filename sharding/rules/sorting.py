"""Factor rules of `sort` and `top_k`."""

from __future__ import annotations

from collections.abc import Sequence

from .rule import Kind, Rule, RuleBuilder, Shape
from .shape import Params


def sort(ins: Sequence[Shape], outs: Sequence[Shape], params: Params) -> Rule:
    """The sorted dim must be replicated inside the op; it does not propagate if it is the only dim."""
    rule, sorted_dim = RuleBuilder(ins, outs), params["dimension"]
    alone = all(size == 1 for d, size in enumerate(ins[0]) if d != sorted_dim)
    for d, size in enumerate(ins[0]):
        is_sorted = d == sorted_dim
        rule.everywhere(d, size, Kind.REPLICATE if is_sorted else Kind.PASS, blocked=is_sorted and alone)
    return rule.build()


def top_k(ins: Sequence[Shape], outs: Sequence[Shape], params: Params) -> Rule:
    """The searched dim must be replicated."""
    dim = params.get("axis", -1) % len(ins[0])
    rule = RuleBuilder(ins, outs)
    for d, size in enumerate(ins[0]):
        rule.everywhere(d, size, Kind.REPLICATE if d == dim else Kind.PASS, blocked=d == dim)
    return rule.build()


def approx_top_k(ins: Sequence[Shape], outs: Sequence[Shape], params: Params) -> Rule:
    """Same as `top_k`, along `reduction_dimension`."""
    return top_k(ins, outs, {"axis": params["reduction_dimension"]})
