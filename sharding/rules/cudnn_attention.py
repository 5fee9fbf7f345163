"""Rules of cuDNN's fused attention, which `jax.nn.dot_product_attention(implementation="cudnn")` calls.

Batch and heads can be sharded: a device's shards of queries, keys and values are an attention of their own. Of grouped
queries, the heads of keys and values. Positions and features are needed whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from . import notation
from .rule import Rule, Shape

HEADS_FIRST = 1
"""The value of the parameter `layout` for (batch, heads, positions, features); else heads are the third dim."""
NUM_FORWARD = 10
"""Operands: queries, keys, values, bias, two lengths, two offsets and two page tables; backward also the statistics of
the softmax, the result and its cotangent."""
WHOLE = ("t", "s", "d", "v", "g")


def forward(ins: Sequence[Shape], outs: Sequence[Shape], params: Mapping[str, Any]) -> Rule | None:
    """Rule of `dot_product_attention_fwd_wrapper`: the result, and statistics of the softmax if it is trained."""
    if len(ins) != NUM_FORWARD or not _is_partitionable(ins, params):
        return None
    arrays = _Arrays(ins, params)
    return arrays.rule(ins, outs, [arrays.result, *["b (k g) t"] * (len(outs) - 1)])


def backward(ins: Sequence[Shape], outs: Sequence[Shape], params: Mapping[str, Any]) -> Rule | None:
    """Rule of `dot_product_attention_bwd_wrapper`: gradients of queries, keys, values and maybe of the bias."""
    if len(ins) != NUM_FORWARD + 3 or not _is_partitionable(ins, params):
        return None
    arrays = _Arrays(ins, params)
    more = ["b (k g) t", arrays.result, arrays.result]
    return arrays.rule(ins, outs, [*arrays.inputs, arrays.bias][: len(outs)], more)


def _is_partitionable(ins: Sequence[Shape], params: Mapping[str, Any]) -> bool:
    """Whether devices can attend alone: not to packed or paged sequences, or with dropout, which has one seed."""
    return not any(0 not in shape for shape in ins[6:NUM_FORWARD]) and not params["dropout_rate"]


class _Arrays:
    """The notation of each array."""

    def __init__(self, ins: Sequence[Shape], params: Mapping[str, Any]):
        is_first = getattr(params["layout"], "value", params["layout"]) == HEADS_FIRST
        text = "b {h} {p} {f}" if is_first else "b {p} {h} {f}"
        self.inputs = [
            text.format(h="(k g)", p="t", f="d"),
            text.format(h="k", p="s", f="d"),
            text.format(h="k", p="s", f="v"),
        ]
        self.result = text.format(h="(k g)", p="t", f="v")
        names, heads = ("b", "(k g)", "t", "s"), ins[0][1 if is_first else 2]
        whole = (ins[0][0], heads, ins[0][2 if is_first else 1], ins[1][2 if is_first else 1])
        bias = ins[3]
        self.bias = (
            " ".join(n if size == full else "1" for n, size, full in zip(names, bias, whole, strict=True))
            if len(bias) == len(names)
            else "1"
        )
        self.lengths = ["b" if shape == (whole[0],) else "1" for shape in ins[4:6]]

    def rule(
        self, ins: Sequence[Shape], outs: Sequence[Shape], results: Sequence[str], more: Sequence[str] = ()
    ) -> Rule:
        """The rule with the given results, and with more operands."""
        operands = [*self.inputs, self.bias, *self.lengths, *["1"] * 4, *more]
        sums = [n for n in ("b", "k") if not all(n in text for text in results)]
        parsed = notation.parse(
            f"{', '.join(operands)} -> {', '.join(results)}", reduction=sums, need_replication=WHOLE
        )
        return parsed.at(ins, outs).rule(ins, outs)
