"""Factor rules of random number generation: each device generates its own shard without communication."""

from __future__ import annotations

from collections.abc import Sequence

from .rule import Kind, Rule, RuleBuilder, Shape
from .shape import Params


def random_bits(ins: Sequence[Shape], outs: Sequence[Shape], params: Params) -> Rule:
    """Batch dims of the keys pass through; the sampled dims are factors of the result alone."""
    del params
    rule = RuleBuilder(ins, outs)
    for d, size in enumerate(ins[0]):
        rule.factor([d], [d], size)
    return rule.build()


def key_data(ins: Sequence[Shape], outs: Sequence[Shape], params: Params) -> Rule:
    """`random_wrap` and `random_unwrap`: batch dims pass through, the words of a key are replicated."""
    del params
    rule = RuleBuilder(ins, outs)
    ndim = min(len(ins[0]), len(outs[0]))
    for d in range(ndim):
        rule.factor([d], [d], ins[0][d])
    for d in range(ndim, len(ins[0])):
        rule.factor([d], [None], ins[0][d], Kind.REPLICATE)
    for d in range(ndim, len(outs[0])):
        rule.factor([None], [d], outs[0][d], Kind.REPLICATE)
    return rule.build()


def random_bits_with_key(ins: Sequence[Shape], outs: Sequence[Shape], params: Params) -> Rule:
    """Key -> (next key, bits): the words of a key are replicated, the sampled dims are factors of the result alone."""
    del params
    rule = RuleBuilder(ins, outs)
    for d, size in enumerate(ins[0]):
        rule.factor([d], [d, None], size, Kind.REPLICATE, blocked=True)
    return rule.build()


def generated(ins: Sequence[Shape], outs: Sequence[Shape], params: Params) -> Rule:
    """All results have one shape and are sharded identically; the operands share no factor with them."""
    del params
    rule = RuleBuilder(ins, outs)
    for d, size in enumerate(outs[0]):
        rule.factor([None] * len(ins), [d] * len(outs), size)
    return rule.build()
