"""What is refused before anything compiles, where the user asked for it: uneven splits, gathers that cost too much."""

from __future__ import annotations

from collections.abc import Mapping

from .errors import ShardingError, raise_together
from .explain import Ledger
from .graph import Graph
from .spec import axis_name, indivisible, to_partition_spec


def refuse_uneven(graph: Graph, sizes: Mapping[str, int], function: str) -> None:
    """Raises for annotations whose axes don't divide their array, all together."""
    failures = [
        ShardingError(
            f"{pin.origin}: {to_partition_spec(pin.spec)}",
            there=[f"an array of shape {graph.shapes[v]}", *faults],
            must="under strict=True the axes' sizes divide the dim",
            fix="a size that divides, fewer axes, or strict=False to have it padded",
        )
        for v, pin in graph.pins.items()
        if (faults := indivisible(pin.spec, graph.shapes[v], sizes))
    ]
    raise_together(function, failures)


def refuse_gathers(ledger: Ledger, limit: int, function: str) -> None:
    """Raises for gathers that nobody asked for, of more than so many bytes a device, all together."""
    failures = [
        ShardingError(
            f"{c.op} at {c.source}" if c.source else c.op,
            there=f"{c.cause}: an all-gather over {', '.join(map(axis_name, c.axes))}, {c.result_bytes} bytes a device",
            must=f"no array is gathered unasked to more than max_implicit_bytes={limit}",
            fix=c.hint,
        )
        for c in ledger
        if c.is_move and c.kind == "all-gather" and c.result_bytes > limit
    ]
    raise_together(function, failures)
