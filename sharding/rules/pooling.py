"""Factor rules of pooling and its gradient."""

from __future__ import annotations

from collections.abc import Sequence

from .rule import Kind, Rule, RuleBuilder, Shape
from .shape import Params


def reduce_window(ins: Sequence[Shape], outs: Sequence[Shape], params: Params) -> Rule:
    """Dims with a trivial window pass through; the others are sharded over windows and exchange halos."""
    rule = RuleBuilder(ins, outs)
    for d, windows in enumerate(outs[0]):
        rule.everywhere(d, windows, Kind.PASS if _is_trivial(params, d) else Kind.PERMUTE)
    return rule.build()


def select_and_scatter(ins: Sequence[Shape], outs: Sequence[Shape], params: Params) -> Rule:
    """Gradient of max pooling, (source, operand) -> operand; the source is replicated along windowed dims."""
    rule = RuleBuilder(ins, outs)
    none = [None] * (len(ins) - 2)
    for d, (windows, size) in enumerate(zip(ins[0], ins[1], strict=True)):
        if _is_trivial(params, d):
            rule.factor([d, d, *none], [d], size)
        else:
            rule.factor([d, None, *none], [None], windows, Kind.REPLICATE)
            rule.factor([None, d, *none], [d], size, Kind.PERMUTE)
    return rule.build()


def _is_trivial(params: Params, d: int) -> bool:
    """Whether the window along a dim has size and stride 1, without padding or dilation."""
    base = params.get("base_dilation")
    plain = params["window_dimensions"][d] == params["window_strides"][d] == 1 and (base is None or base[d] == 1)
    return plain and tuple(params["padding"][d]) == (0, 0)
