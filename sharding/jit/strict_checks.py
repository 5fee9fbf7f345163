"""Opt-in checks before compilation: annotations that do not divide evenly, and large implicit all-gathers."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import ShardingError, raise_together
from ..explain import Ledger
from ..graph import Graph
from ..spec import axis_name, indivisible, to_partition_spec


def refuse_uneven(graph: Graph, sizes: Mapping[str, int], function: str) -> None:
    """Raises one error for all annotations whose axes do not divide their array."""
    failures = [
        ShardingError(
            f"{annotation.origin}: {to_partition_spec(annotation.spec)}",
            found=[f"an array of shape {graph.shapes[v]}", *faults],
            required="dims divisible by the product of their axis sizes, under strict=True",
            fix="a divisible size, fewer axes, or strict=False for padding",
        )
        for v, annotation in graph.annotations.items()
        if (faults := indivisible(annotation.spec, graph.shapes[v], sizes))
    ]
    raise_together(function, failures)


def refuse_gathers(ledger: Ledger, limit: int, function: str) -> None:
    """Raises one error for all implicit all-gathers of more than `limit` bytes per device."""
    failures = [
        ShardingError(
            f"{c.op} at {c.source}" if c.source else c.op,
            found=f"{c.cause}: all-gather over {', '.join(map(axis_name, c.axes))}, {c.result_bytes} bytes per device",
            required=f"implicit all-gathers of at most max_implicit_bytes={limit}",
            fix=c.hint,
        )
        for c in ledger
        if c.is_move and c.kind == "all-gather" and c.result_bytes > limit
    ]
    raise_together(function, failures)
