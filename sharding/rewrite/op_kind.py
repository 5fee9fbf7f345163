"""What the strategy of an op depends on beside the specs of its arrays: equal ops with equal specs run alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..graph import Graph, Op
from ..rules import ON_SHARDS, Kind
from .sliding_windows import WINDOWS

REDUCE_SCATTERED = "dot_general"
"""The op whose sum is reduce-scattered if its result is sharded over axes of the sum; others are all-reduced, then
sliced."""

LONG_RANGE = frozenset({"cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum", "split"})
"""Ops that send data beyond the next device along a permuted dim, which is therefore replicated while they run."""

PER_ITERATION = frozenset({"scan xs", "scan ys"})
"""Reads and writes of one row: what the stack is resharded to saves nothing that an iteration must undo."""

PADDED_FIRST = WINDOWS.keys() - {"conv_general_dilated"}
"""Ops with windows that run on operands that are replicated along these."""

REGROUPING = frozenset({"reshape"})
"""Ops that keep every element: factors that only their operands or only their results have are replicated while they
run."""

ON_EQUAL_SHARDS = ON_SHARDS | {"custom_partitioning"}
"""Ops that run a function on each device, which takes equal shards along whole axes."""

SPECIAL = LONG_RANGE | PER_ITERATION | ON_EQUAL_SHARDS | REGROUPING | {REDUCE_SCATTERED}
"""Ops whose strategy depends on more than their rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpKind:
    """What ops of one rule have in common that run alike where their arrays are sharded alike."""

    special: Any
    """The name of an op, its window or direction, where more than the rule matters."""
    alike: tuple[int, ...]
    """For each operand of a product, the number of products that read it alike and can share its reshard."""
    permutes: bool
    """Whether collective-permutes are allowed: not if only some devices run the op."""
    manual: tuple[str, ...]
    """Manual axes of enclosing `shard_map`s."""
    shapes: tuple[tuple[int, ...], ...]
    itemsizes: tuple[int, ...]
    free: tuple[bool, ...]
    """Whether each operand is a constant expression, generated as needed without resharding."""


class Numbered(NamedTuple):
    """A kind, with what ops of another rule or kind do not have."""

    number: int
    kind: OpKind
    text: str
    """Equal in all processes."""


def op_kinds(graph: Graph) -> dict[int, Numbered]:
    """id of an op that has a rule -> its kind; found once for all shardings of a program."""
    return graph.once("op kinds", lambda: _op_kinds(graph))


def _op_kinds(graph: Graph) -> dict[int, Numbered]:
    ops = [op for op in graph.ops if op.rule is not None and (op.operands or op.results)]
    readers = Counter(reader for op in ops if op.name == REDUCE_SCATTERED for reader in _reads(graph, op))
    values = {*graph.inputs, *graph.makers}
    found, known = dict[int, Numbered](), dict[tuple[int, OpKind], Numbered]()
    for op in ops:
        kind = _kind(graph, op, readers, values)
        # By identity: the graph keeps its rules, and hashing one is slow.
        key = id(op.rule), kind
        if key not in known:
            known[key] = Numbered(len(known), kind, f"{op.rule!r} {kind}")
        found[id(op)] = known[key]
    return found


def _kind(graph: Graph, op: Op, readers: Counter[tuple], known: Set[int]) -> OpKind:
    values = (*op.operands, *op.results)
    shapes = tuple(graph.shapes[v] for v in values)
    special: Any = op.name if op.name in SPECIAL else ""
    if op.name == "rev":
        special = op.site[0].params["dimensions"]
    elif op.name in PADDED_FIRST:
        special = (op.name, *WINDOWS[op.name](op.site[0].params, shapes))
    if graph.changes_memory(op):
        special = "to host" if op.results[0] in graph.memory_kinds else "from host"
    is_product = op.name == REDUCE_SCATTERED
    return OpKind(
        special=special,
        alike=tuple(readers[reader] for reader in _reads(graph, op)) if is_product else (),
        permutes=not graph.diverges(op),
        manual=tuple(sorted(graph.manual.get((op.results or op.operands)[0], ()))),
        shapes=shapes,
        itemsizes=tuple(graph.itemsize(v) for v in values),
        free=tuple(v not in known for v in op.operands),
    )


def _reads(graph: Graph, op: Op) -> Iterator[tuple]:
    """For each operand of a product, what the products that can share its reshard have in common.

    The products for q, k and v read their input alike: the same array, of which they sum the same dims.
    """
    assert op.rule is not None
    region = graph.regions.get(id(op.site[0])) if op.site else None
    for v, dims in zip(op.operands, op.rule.operands, strict=True):
        yield v, id(region), tuple(op.rule.kinds[f] is Kind.REDUCE for factors in dims for f in factors)
