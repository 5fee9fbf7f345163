"""Values that are converted to a wider dtype right before they are resharded, or to a narrower one right behind.

XLA:GPU moves the narrow value (its `CollectiveQuantizer`): masks and one-hot vectors as bytes, upcast logits as
bfloat16, a slice of float32 weights that is only read in bfloat16. XLA:TPU takes the maximum of narrow values.
"""

from __future__ import annotations

from typing import Any

from ..graph import Graph

MOVED = frozenset({"all-gather", "all-to-all", "collective-permute"})
"""The collectives before which nothing is widened."""

FORMATTING = frozenset({"annotate", "copy", "expand_dims", "reshape", "slice", "squeeze", "transpose"})
"""Ops that may stand between the conversion and the collective."""


def narrow_dtypes(graph: Graph) -> dict[int, Any]:
    """Value -> the narrower dtype that it is moved in."""
    found: dict[int, Any] = {}
    converted: set[int] = set()
    known = {*graph.inputs, *graph.makers}
    for op in graph.ops:
        if op.name == "convert_element_type" and 0 < graph.itemsize(op.operands[0]) < graph.itemsize(op.results[0]):
            found[op.results[0]] = graph.dtypes[op.operands[0]]
            converted.add(op.results[0])
        elif op.name in FORMATTING and op.operands[0] in found:
            found[op.results[0]] = found[op.operands[0]]
        elif op.name in ("div", "mul") and len(widened := [v for v in op.operands if v in converted]) == 1:
            others = [v for v in op.operands if v not in converted]
            if all(not graph.shapes[v] or v not in known for v in others):  # a scalar, or one that is broadcast
                found[op.results[0]] = found[widened[0]]
    return _narrowed(graph) | found


def _narrowed(graph: Graph) -> dict[int, Any]:
    """Value -> the narrower dtype that its only use converts it to."""
    found: dict[int, Any] = {}
    for op in reversed(graph.ops):
        if op.name == "convert_element_type" and 0 < graph.itemsize(op.results[0]) < graph.itemsize(op.operands[0]):
            dtype = graph.dtypes[op.results[0]]
        elif op.name in FORMATTING and op.results[0] in found:
            dtype = found[op.results[0]]
        else:
            continue
        if graph.num_uses[op.operands[0]] == 1:
            found[op.operands[0]] = dtype
    return found


PICKS = frozenset({"dynamic_slice", "gather", "slice"})
"""Ops that read elements at some indices."""


def narrow_maxima(graph: Graph) -> set[int]:
    """Maxima of bfloat16 values that are converted to float32, as in a softmax: XLA:TPU converts them then.

    Not if elements are picked from the converted values, too, as the logits of labels.
    """
    converted: dict[int, int] = {}
    """Value -> the conversion that it is of."""
    maxima: list[tuple[int, int]] = []
    picked: set[int] = set()
    for op in graph.ops:
        source = converted.get(op.operands[0]) if op.operands else None
        if op.name == "convert_element_type":
            dtypes = tuple(graph.dtype_names[v] for v in (*op.operands, *op.results))
            converted |= {v: v for v in op.results if dtypes == ("bfloat16", "float32")}
        elif source is None:
            continue
        elif op.name in PICKS:
            picked.add(source)
        elif op.name in FORMATTING:
            converted |= dict.fromkeys(op.results, source)
        elif op.name == "reduce_max":
            maxima += [(v, source) for v in op.results]
    return {v for v, source in maxima if source not in picked}
