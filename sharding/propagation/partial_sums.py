"""Partial sums: values still to be reduced over mesh axes, from the op that produces them to the op that needs the sum.

A dot product over a sharded contracting dim, or a sum along a sharded dim, leaves a *partial* value: OneFlow's P
(arXiv:2110.15032, section 3), Shardy's `unreduced`. Linear ops accept it, others need the sum. XLA reduces at once;
this module says how long the reduction could be deferred, and its bytes at either end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..graph import Graph, Op
from ..rules import Kind
from ..spec import Axis, Spec, axis_name, axis_size
from .axis_atoms import AtomTable
from .factor_propagation import project
from .interned_shardings import ValueSharding
from .propagation_graph import OpForm

SUMS = frozenset(
    """
    conv_general_dilated dot_general gather ragged_dot_general reduce_sum scaled_dot scaled_matmul scaled_matmul_wrapper
    scatter-add
    """.split()
)
"""Primitives whose reduction factors are sums."""

LINEAR_IN_ALL = frozenset("add add_any concatenate select_n stack sub".split())
"""Linear if all their arrays are partial over the same axes."""

LINEAR_IN_EACH = frozenset("conv_general_dilated dot_general mul ragged_dot_general scaled_dot".split())
"""Linear in each of their operands separately."""

LINEAR_IN_FIRST = frozenset(
    """
    annotate broadcast_in_dim convert_element_type copy cumsum div dynamic_slice gather imag neg pad real reduce_sum
    reduce_window_sum reshape rev slice split squeeze tile transpose unstack
    """.split()
)
"""Linear in their first operand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingSum:
    """A partial value, and the op that first needs its sum."""

    value: int
    name: str
    """The value's name, or its type if it has none."""
    axes: tuple[Axis, ...]
    """The mesh axes to reduce over."""
    source: str
    """The user's line that produces it."""
    until: str
    """The op that needs the sum; `sharded` if the value is also sharded over one of the axes; `returned` at the end."""
    until_source: str
    num_bytes: int
    """Bytes per device where it is produced."""
    until_bytes: int
    """Bytes per device where the sum is needed."""

    def __str__(self) -> str:
        axes = ", ".join(map(axis_name, self.axes))
        where = f"{self.until} at {self.until_source}" if self.until_source else self.until
        return (
            f"{self.name} at {self.source} is a partial sum over {axes} ({self.num_bytes:,} bytes), "
            f"until {where} ({self.until_bytes:,} bytes)"
        )


@dataclass(slots=True)
class _Origin:
    """The op that produced a partial value."""

    value: int
    axes: tuple[Axis, ...]
    op: Op
    joined: list[_Origin]
    """Other partial values that were added to it."""
    ended: bool = False


def find(graph: Graph, specs: Sequence[Spec], sizes: Mapping[str, int]) -> tuple[PendingSum, ...]:
    """Returns every partial value of a completed program once, in the order in which their sums are needed."""
    table = AtomTable.of(sizes)
    pending: dict[int, _Origin] = {}
    found: list[PendingSum] = []

    def end(value: int, op: Op | None) -> None:
        waiting = [pending[value]]
        while waiting:
            origin = waiting.pop(0)
            if not origin.ended:
                origin.ended = True
                found.append(_pending_sum(graph, specs, sizes, origin, value, op))
                waiting += origin.joined

    for op in graph.ops:
        partial = [v for v in dict.fromkeys(op.operands) if v in pending]
        deferred = _deferred(op, pending) if partial else None
        for v in partial:
            if deferred is None or pending[v].axes != deferred.axes:
                end(v, op)
        unreduced = _unreduced_axes(op, specs, table)
        if unreduced and deferred is not None:
            for v in partial:
                end(v, op)
            deferred = None
        origin = _Origin(op.results[0], unreduced, op, []) if unreduced else deferred
        if origin is None:
            continue
        for v in op.results:
            pending[v] = origin
            if any(axis in dim.axes for dim in specs[v].dims for axis in origin.axes):
                end(v, op)
                del pending[v]
    used = {v for op in graph.ops for v in op.operands}
    for v in pending:
        if v not in used:
            end(v, None)
    return tuple(found)


def _deferred(op: Op, pending: Mapping[int, _Origin]) -> _Origin | None:
    """Returns the origin of an op's result if the op is linear in its partial operands."""
    arrays = [pending.get(v) for v in op.operands]
    partial = [origin for origin in arrays if origin is not None]
    if op.name in LINEAR_IN_ALL:
        arrays = arrays[1:] if op.name == "select_n" else arrays
        same = None not in arrays and len({origin.axes for origin in partial}) == 1 and len(partial) == len(arrays)
        if not same:
            return None
        partial[0].joined += [origin for origin in partial[1:] if origin is not partial[0]]
        return partial[0]
    if op.name in LINEAR_IN_EACH:
        return partial[0] if len(partial) == 1 else None
    if op.name in LINEAR_IN_FIRST:
        return partial[0] if len(partial) == 1 and arrays[0] is not None else None
    return None


def _unreduced_axes(op: Op, specs: Sequence[Spec], table: AtomTable) -> tuple[Axis, ...]:
    """Returns the axes over which the result of an op is a partial sum."""
    if op.rule is None or op.name not in SUMS:
        return ()
    form = OpForm.of(0, op.rule, single_use=False, firsts=None)
    atoms = [tuple(map(table.atoms_of, specs[v].axes)) for v in op.operands]
    shardings = [ValueSharding(axes, (False,) * len(axes)) for axes in atoms]
    projected = [project(form, i, sharding, table.sizes).factors for i, sharding in enumerate(shardings)]
    axes: list[Axis] = []
    for factor, kind in enumerate(op.rule.kinds):
        found = {factors[factor] for factors in projected if factor in factors}
        if kind is Kind.REDUCE and len(found) == 1:
            axes += table.axes_of(*found)
    return tuple(axes)


def _pending_sum(
    graph: Graph, specs: Sequence[Spec], sizes: Mapping[str, int], origin: _Origin, last: int, op: Op | None
) -> PendingSum:
    def num_bytes(v: int) -> int:
        own = math.prod(axis_size(a, sizes) for dim in specs[v].dims for a in dim.axes if a not in origin.axes)
        return graph.num_bytes(v) // own

    return PendingSum(
        value=origin.value,
        name=graph.label(origin.value),
        axes=origin.axes,
        source=origin.op.source,
        until=_until(op, last),
        until_source="" if op is None else op.source,
        num_bytes=num_bytes(origin.value),
        until_bytes=num_bytes(last),
    )


def _until(op: Op | None, value: int) -> str:
    if op is None or (op.name == "edge" and not op.site):
        return "returned"
    return "sharded" if value in op.results else op.name
