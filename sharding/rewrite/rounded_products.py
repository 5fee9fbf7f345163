"""Products of quantised arrays: integers that are only read in bfloat16.

XLA:TPU makes such a product and its rounding one op, before it partitions, if no constraint stands between them. Its
partial results are all-reduced in bfloat16 then, in half of the bytes.
"""

from __future__ import annotations

from ..graph import Graph, Op


def rounded_product(graph: Graph, op: Op) -> int | None:
    """The product of integers that an op rounds to bfloat16 in the same body, as its only use; else None."""
    if op.name != "convert_element_type":
        return None
    (v,), (result,) = op.operands, op.results
    maker = graph.makers.get(v)
    is_product = maker is not None and maker.name == "dot_general" and maker.site[1:] == op.site[1:]
    is_rounded = graph.dtype_names[v] == "int32" and graph.dtype_names[result] == "bfloat16"
    return v if is_product and is_rounded and graph.num_uses[v] == 1 else None
