"""Factor rules of collectives, which occur in the body of a `shard_map` beside axes that are left to the compiler."""

from __future__ import annotations

from collections.abc import Sequence

from .rule import Kind, Rule, RuleBuilder, Shape
from .shape import Params


def gathered(ins: Sequence[Shape], outs: Sequence[Shape], params: Params) -> Rule:
    """`all_gather`, `reduce_scatter` and `all_to_all`: the dims that parts are put together or cut along are whole.

    Tiled, a dim grows or shrinks in place; else the number of parts is a dim of its own.
    """
    rule = RuleBuilder(ins, outs)
    gone, new = _dims(params)
    tiled = params["tiled"]
    sources = [d for d in range(len(ins[0])) if tiled or d != gone]
    targets = [d for d in range(len(outs[0])) if tiled or d != new]
    for i, o in zip(sources, targets, strict=True):
        if tiled and i in (gone, new):
            rule.factor([i], [None], ins[0][i], Kind.REPLICATE, blocked=True)
            rule.factor([None], [o], outs[0][o], Kind.REPLICATE, blocked=True)
        else:
            rule.factor([i], [o], ins[0][i])
    return rule.build()


def _dims(params: Params) -> tuple[int | None, int | None]:
    """The operand's dim that is cut, and the result's that is put together."""
    if "split_axis" in params:
        return params["split_axis"], params["concat_axis"]
    return params.get("scatter_dimension"), params.get("all_gather_dimension")
