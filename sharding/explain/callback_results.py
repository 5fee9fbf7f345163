"""The collectives by which all devices receive what a callback, which one of them calls, returns."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping

from ..graph import Graph, Op
from .collective_hints import unknown_op_fix
from .collective_ledger import Collective

CALLBACKS = frozenset({"io_callback", "pure_callback"})
"""Primitives that call the host from the first device of the program."""


def broadcast_results(op: Op, graph: Graph, sizes: Mapping[str, int]) -> Iterator[tuple[int, Collective]]:
    """(result, the all-reduce that broadcasts it) for each result of a callback that is read; none for other ops.

    In a `shard_map` each device calls the callback itself.
    """
    axes = tuple(axis for axis, size in sizes.items() if size > 1)
    if op.name not in CALLBACKS or not axes:
        return
    for v in op.results:
        if v in graph.live_values and not graph.manual.get(v):
            yield v, Collective(
                kind="all-reduce", axes=axes, num_devices=math.prod(sizes.values()), count=op.times, op=op.name,
                result_bytes=graph.num_bytes(v), dtype=graph.dtype_names[v], source=op.source, is_move=True,
                cause=f"{op.name} runs on one device", advise=functools.partial(unknown_op_fix, op),
            )  # fmt: skip
