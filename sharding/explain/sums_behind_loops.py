"""Sums that a loop only adds up or stacks: XLA:TPU and XLA:GPU reduce them once, behind the loop.

After `WhileLoopAllReduceCodeMotion` of openxla/xla, which leaves reduce-scatters in the loop.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ..cost import Kind
from ..graph import Graph, Op
from ..hardware import Platform
from ..spec import Axis

Reduction = tuple[Kind, tuple[Axis, ...]]
"""The kind and axes of a collective that completes a sum."""

ADDS = frozenset({"add", "add_any"})

MOST_STACKED_BYTES = 10 << 10
"""Bytes on one device, in the dtype of the sums, above which a stack of sums is reduced row by row, in the loop;
measured (libtpu 0.0.52 and `jax[cuda13]` 0.12.0.1: 10,240 bytes are moved, 12,288 are not)."""


class SumsBehindLoop(NamedTuple):
    """The reductions of a loop's result."""

    reductions: tuple[Reduction, ...]
    dtype: str
    """Of the sums, to which compilers sink conversions: those of a stack run behind the loop, too."""


def sums_behind_loops(
    graph: Graph,
    platform: Platform,
    left: dict[int, tuple[Reduction, ...]],
    reduced: Callable[[int], int | None],
    moves: Callable[[Op], bool],
    is_sliced: Callable[[int], bool],
    shard_bytes: Callable[[int], int],
) -> dict[int, SumsBehindLoop]:
    """Result of a loop -> the all-reduces that move behind it; they are removed from `left`.

    Args:
        graph: the program.
        platform: whose compiler moves them.
        left: value -> the reductions behind its op.
        reduced: the reduced value that a value is a formatted form of, if any.
        moves: whether an op reshards any of its arrays.
        is_sliced: whether each device keeps a slice of an all-reduced value.
        shard_bytes: bytes of a value on one device.
    """
    updates: defaultdict[int, list[tuple[int, bool]]] = defaultdict(list)
    """Sum -> the results of the loop that it updates, and whether they are stacks."""
    for edge in graph.ops:
        if edge.name == "edge" and edge.site:
            for v, is_stacked in _only_updates(graph, edge, moves):
                if (source := reduced(v)) is not None and not is_sliced(source):
                    updates[source].append((edge.results[0], is_stacked))
    found: dict[int, SumsBehindLoop] = {}
    for source, updated in updates.items():
        last = _last_all_reduces(left[source])
        bytes_of_stacks = [
            shard_bytes(result) * _summed_itemsize(graph, source) // graph.itemsize(result)
            for result, is_stacked in updated
            if is_stacked
        ]
        if last and len(updated) == graph.num_uses[source] and max(bytes_of_stacks, default=0) <= MOST_STACKED_BYTES:
            left[source] = left[source][: -len(last)]
            for result, is_stacked in updated:
                dtype = _dtype(graph, platform, source, result, is_stacked=is_stacked)
                found[result] = SumsBehindLoop(last, dtype)
    return found


def _dtype(graph: Graph, platform: Platform, source: int, result: int, *, is_stacked: bool) -> str:
    """The dtype in which sums are reduced behind a loop: XLA:TPU adds up the converted, and stacks the narrow ones."""
    of = source
    if platform == "tpu":
        of = min(source, result, key=graph.itemsize) if is_stacked else result
    return graph.dtype_names[of]


def _summed_itemsize(graph: Graph, source: int) -> int:
    """Bytes per element of a sum, which is narrowed only behind the loop if its terms were not as narrow."""
    op = graph.makers[source]
    is_narrowed = op.name == "convert_element_type" and not is_narrow_sum(graph, op)
    return graph.itemsize(op.operands[0] if is_narrowed else source)


def is_narrow_sum(graph: Graph, op: Op) -> bool:
    """Whether an op narrows the sum of what was widened, which compilers sum in the narrow dtype."""
    (v,) = op.operands
    maker = graph.makers.get(v)
    while maker is not None and maker.name in ("annotate", "reduce_sum", "reshape"):
        v = maker.operands[0]
        maker = graph.makers.get(v)
    if maker is None or maker.name != op.name:
        return False
    return graph.dtypes[maker.operands[0]] == graph.dtypes[op.results[0]]


def _last_all_reduces(reductions: Sequence[Reduction]) -> tuple[Reduction, ...]:
    """The all-reduces that no reduce-scatter follows."""
    found = [*itertools.takewhile(lambda reduction: reduction[0] == "all-reduce", reversed(reductions))]
    return tuple(reversed(found))


def _only_updates(graph: Graph, edge: Op, moves: Callable[[Op], bool]) -> Iterator[tuple[int, bool]]:
    """What an iteration only adds to a carry, or only writes to a stack, and whether it is the stack."""
    (carry,), update = edge.results, graph.makers.get(edge.operands[-1])
    if update is not None and update.name == "scan ys":
        yield from ((v, True) for v in update.operands)
    if update is None or len(edge.operands) != 2 or update.name not in ADDS or moves(update):
        return
    carried, inside = [carry], []
    for v in carried:
        users = [op for op in graph.users[v] if op.times > edge.times]
        carried += [v for op in users if _is_same(graph, op) for v in op.results]
        inside += [op for op in users if not _is_same(graph, op)]
    added = [v for v in update.operands if v not in carried]
    if inside == [update] and len(added) == 1 and len(graph.users[edge.operands[-1]]) == 1:
        yield added[0], False


def _is_same(graph: Graph, op: Op) -> bool:
    """Whether an op converts an array to the dtype that it has, such as a weakly typed one."""
    return op.name == "convert_element_type" and graph.dtypes[op.operands[0]] == graph.dtypes[op.results[0]]
