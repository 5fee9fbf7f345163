"""Factor rules of collectives in the body of a partially manual `shard_map`."""

from __future__ import annotations

from collections.abc import Sequence

from .rule import Kind, Rule, RuleBuilder, Shape
from .shape import Params


def gather_or_scatter(ins: Sequence[Shape], outs: Sequence[Shape], params: Params) -> Rule:
    """`all_gather`, `reduce_scatter` and `all_to_all`: the gathered and the scattered dim must be replicated.

    If tiled, a dim grows or shrinks in place; otherwise the number of shards is a dim of its own.
    """
    rule = RuleBuilder(ins, outs)
    scattered, gathered = _dims(params)
    tiled = params["tiled"]
    sources = [d for d in range(len(ins[0])) if tiled or d != scattered]
    targets = [d for d in range(len(outs[0])) if tiled or d != gathered]
    for i, o in zip(sources, targets, strict=True):
        if tiled and i in (scattered, gathered):
            rule.factor([i], [None], ins[0][i], Kind.REPLICATE, blocked=True)
            rule.factor([None], [o], outs[0][o], Kind.REPLICATE, blocked=True)
        else:
            rule.factor([i], [o], ins[0][i])
    return rule.build()


def ragged_all_to_all(ins: Sequence[Shape], outs: Sequence[Shape], params: Params) -> Rule:
    """`ragged_all_to_all`: rows go to other devices, at positions that an `output` operand is overwritten at."""
    del params
    rule = RuleBuilder(ins, outs)
    others = [None] * (len(ins) - 2)
    rule.factor([0, None, *others], [None], ins[0][0], Kind.REPLICATE, blocked=True)
    rule.factor([None, 0, *others], [0], ins[1][0], Kind.REPLICATE, blocked=True)
    for d, size in enumerate(ins[0][1:], start=1):
        rule.factor([d, d, *others], [d], size)
    return rule.build()


def _dims(params: Params) -> tuple[int | None, int | None]:
    """Returns the scattered dim of the operand and the gathered dim of the result."""
    if "split_axis" in params:
        return params["split_axis"], params["concat_axis"]
    return params.get("scatter_dimension"), params.get("all_gather_dimension")
