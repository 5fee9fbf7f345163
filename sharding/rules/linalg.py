"""Factor rules of linear algebra and FFT: batch dims pass through, all others must be replicated."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .rule import Kind, Rule, RuleBuilder, Shape
from .shape import Params


def batched(num_core: int) -> Callable[[Sequence[Shape], Sequence[Shape], Params], Rule]:
    """Returns the rule of an op on the last `num_core` dims of its first operand; the dims before them pass through."""

    def make(ins: Sequence[Shape], outs: Sequence[Shape], params: Params) -> Rule:
        del params
        rule, num_batch = RuleBuilder(ins, outs), len(ins[0]) - num_core
        for d in range(num_batch):
            rule.everywhere(d, ins[0][d])
        _replicate(rule, [range(num_batch, len(shape)) for shape in (*ins, *outs)])
        return rule.build()

    return make


def fft(ins: Sequence[Shape], outs: Sequence[Shape], params: Params) -> Rule:
    """Transformed dims must be replicated, the others pass through."""
    rule, num_batch = RuleBuilder(ins, outs), len(ins[0]) - len(params["fft_lengths"])
    for d in range(num_batch):
        rule.everywhere(d, ins[0][d])
    for d in range(num_batch, len(ins[0])):
        if ins[0][d] == outs[0][d]:
            rule.everywhere(d, ins[0][d], Kind.REPLICATE, blocked=True)
        else:
            _replicate(rule, [[d], [d]])
    return rule.build()


def _replicate(rule: RuleBuilder, dims: Sequence[Sequence[int]]) -> None:
    """Adds for each of the given dims, array by array, a factor of its own that must be replicated."""
    n = len(rule.operand_shapes)
    shapes = (*rule.operand_shapes, *rule.result_shapes)
    for t, own in enumerate(dims):
        for d in own:
            at: list[int | None] = [d if t == k else None for k in range(len(shapes))]
            rule.factor(at[:n], at[n:], shapes[t][d], Kind.REPLICATE, blocked=True)
