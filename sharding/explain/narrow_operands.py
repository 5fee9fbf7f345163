"""Operands of matrix products at default precision, which a TPU multiplies in bfloat16.

XLA:TPU rounds such float32 operands before it moves them, so their collectives send half the bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from ..graph import Graph, Op
from ..rewrite.op_strategy import OpStrategies
from ..rewrite.reshard import DimAxes

PRODUCTS = frozenset({"conv_general_dilated", "dot_general"})
FORMATTING = frozenset({"annotate", "broadcast_in_dim", "copy", "name", "reshape", "scan xs", "squeeze", "transpose"})
"""Ops that rounding commutes with."""


def narrow_reshards(graph: Graph, strategies: OpStrategies) -> Collection[tuple[int, DimAxes]]:
    """(value, axes) of each reshard step whose result is read only by products at default precision."""
    rounded = _rounded(graph)
    readers: defaultdict[tuple[int, DimAxes], list[bool]] = defaultdict(list)
    for op in graph.ops:
        if op.rule is not None and op.name != "edge":
            strategy, is_rounded = strategies.of(op), _rounds(op, rounded)
            found = [(v, steps, is_rounded) for v, steps in zip(op.operands, strategy.operand_steps, strict=True)]
            found += [(v, steps, v in rounded) for v, steps in zip(op.results, strategy.result_steps, strict=True)]
            for v, steps, is_narrow in found:
                for step in steps:
                    readers[v, step.spec.axes].append(is_narrow)
    return {key for key, found in readers.items() if all(found)}


def _rounded(graph: Graph) -> set[int]:
    """Values of which every use is a product at default precision, maybe behind formatting ops."""
    outputs, found = set(graph.outputs), set[int]()
    for op in reversed(graph.ops):
        for v in op.results:
            users = graph.users[v]
            if users and v not in outputs and all(_rounds(user, found) for user in users):
                found.add(v)
    return found


def _rounds(op: Op, rounded: Collection[int]) -> bool:
    """Whether an op reads its operands in bfloat16."""
    if op.name in PRODUCTS:
        return _is_default(op.site[0].params.get("precision"))
    return op.name in FORMATTING and all(v in rounded for v in op.results)


def _is_default(precision: object) -> bool:
    """Whether a product's precision is the platform's default."""
    given = precision if isinstance(precision, tuple) else (precision,)
    return all(one is None or getattr(one, "name", str(one)) == "DEFAULT" for one in given)
