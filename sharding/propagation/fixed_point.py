"""The fixed-point engine: propagates shardings along factors until nothing changes.

The hierarchy is Shardy's (openxla/shardy, `docs/propagation.md`): user priorities outside, five op priorities inside,
and within one op the aggressive strategy (`factor_propagation.py`). Annotations are never overwritten; inferred dims
only grow.

The order of visits is that of MLIR's greedy driver, which Shardy uses, since the order decides conflicts: at each level
all ops in program order, and after each change the adjacent ops at once, the latest first. An op that had nothing to
propagate is not visited again until something adjacent changes, so a level costs in proportion to its changes.
The result of a visit is cached by the op's form and its shardings: a deep model repeats them in every layer.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter

import numpy as np

from ..graph import Graph, group_annotations
from ..spec import Spec
from .axis_atoms import AtomTable
from .factor_propagation import Expansion, expansions
from .interned_shardings import ShardingTable, ValueSharding
from .op_priorities import LEVELS
from .propagation_graph import PropagationGraph

ALL_DIRECTION_IDS = 0xFF


@dataclass(slots=True)
class PropagationStep:
    """The op that gave one dim of a value an atom, and the value and dim the atom came from."""

    op: int
    value: int
    """The member of its group that the op gave the atom to."""
    source: int
    source_dim: int


class Engine:
    """The state of a propagation: the sharding of each value by number, and a log of all expansions."""

    def __init__(self, graph: Graph, table: AtomTable):
        self.graph, self.table = graph, table
        self.annotations = group_annotations(graph)
        self.op_graph = PropagationGraph.of(graph)
        self.read = [itemgetter(*values) for values in self.op_graph.values]
        self.shardings = ShardingTable()
        self.specs: dict[int, Spec] = {}
        """Those of the shardings' numbers, so that equal ones are one object."""
        self.visit_cache: dict[tuple, tuple[tuple[int, int, Expansion], ...]] = {}
        self.reset()

    def reset(self) -> None:
        """Replicates all values; keeps the cache."""
        ndims = range(_max_ndim(self.graph) + 1)
        replicated = [self.shardings.number(ValueSharding(((),) * n, (False,) * n)) for n in ndims]
        self.state = [replicated[len(shape)] for shape in self.graph.shapes]
        # For each op the direction ids at which it has nothing to propagate, one bit each.
        self.quiet = bytearray([ALL_DIRECTION_IDS]) * len(self.op_graph.ops)
        self.log: list[tuple[int, Expansion]] = []
        self.level = 0

    def restarted(self, graph: Graph) -> Engine:
        """Returns an engine for the same graph with other annotations, which shares this one's cache.

        It starts over, since the order of propagation decides conflicts, but recomputes no visit.
        """
        engine = copy.copy(self)
        engine.__dict__.pop("log_index", None)
        engine.graph, engine.annotations = graph, group_annotations(graph)
        engine.reset()
        return engine

    def sharding(self, value: int) -> ValueSharding:
        """Returns the current sharding of a value."""
        return self.shardings[self.state[self.graph.representatives[value]]]

    def run(self) -> None:
        """Propagates all annotations, priority by priority, to the fixed point."""
        later = self.start()
        self.propagate()
        for priority in sorted(later):
            for v in later[priority]:
                self.release(v, priority)
            self.propagate()

    def start(self) -> dict[int, list[int]]:
        """Applies the annotations; dims of lower priority are deferred and their axes reserved."""
        later: dict[int, list[int]] = {}
        for v, axes in self.graph.manual.items():
            now = self.sharding(v)
            manual = frozenset(self.table.atoms_of(tuple(axes)))
            self.set(v, ValueSharding(now.axes, now.closed, now.reserved | manual))
        for v, annotation in self.annotations.items():
            axes, closed, reserved = [], [], set(self.sharding(v).reserved)
            for dim in annotation.spec.dims:
                deferred = dim.priority > 0 and bool(dim.axes or not dim.open)
                if deferred:
                    later.setdefault(dim.priority, []).append(v)
                    reserved.update(self.table.atoms_of(dim.axes))
                axes.append(() if deferred else self.table.atoms_of(dim.axes))
                closed.append(deferred or not dim.open)
            self.set(v, ValueSharding(tuple(axes), tuple(closed), frozenset(reserved)))
        return later

    def release(self, v: int, priority: int) -> None:
        """Applies the deferred dims of one value that have this priority."""
        now = self.sharding(v)
        axes, closed, reserved = list(now.axes), list(now.closed), now.reserved
        for d, dim in enumerate(self.annotations[v].spec.dims):
            if dim.priority == priority and (dim.axes or not dim.open):
                axes[d] = self.table.atoms_of(dim.axes)
                closed[d] = not dim.open
                reserved -= set(axes[d])
        self.set(v, ValueSharding(tuple(axes), tuple(closed), reserved))

    def set(self, v: int, sharding: ValueSharding) -> None:
        """Sets the sharding of a value."""
        v = self.graph.representatives[v]
        self.state[v] = self.shardings.number(sharding)
        for i in self.op_graph.adjacent[v]:
            self.quiet[i] = 0

    def propagate(self) -> None:
        """Runs the five op priorities, each to its fixed point."""
        for self.level in range(LEVELS):
            while 1 in (pending := self.pending()):
                self.sweep(pending)

    def sweep(self, pending: bytearray) -> None:
        """Visits the pending ops, and those adjacent to each change.

        An axis that an edge brings into a loop reaches the body in the next sweep only, as the edge follows the body.
        """
        adjacent, quiet, loop_arguments = self.op_graph.adjacent, self.quiet, self.op_graph.loop_arguments
        stack: list[int] = []
        at = -1
        while stack or (at := pending.find(1, at + 1)) >= 0:
            i = stack.pop() if stack else at
            pending[i] = 0
            for v in self.visit(i):
                first = i if v == loop_arguments[i] else 0
                for j in adjacent[v]:
                    quiet[j] = 0
                    if j != i and j >= first and not pending[j]:
                        pending[j] = 1
                        if j <= at:  # already passed in program order
                            stack.append(j)

    def pending(self) -> bytearray:
        """Returns 1 for each op that a visit at the current level may propagate through."""
        direction_ids = self.op_graph.direction_ids[self.level]
        was_quiet = np.right_shift(np.frombuffer(self.quiet, np.uint8), direction_ids) & 1
        return bytearray(((direction_ids > 0) & (was_quiet == 0)).tobytes())

    def visit(self, i: int) -> list[int]:
        """Propagates once through op i and returns the values that changed."""
        form = self.op_graph.forms[i]
        direction_id = form.direction_ids[self.level]
        if direction_id == 0:
            return []
        key = (form.number, direction_id, self.read[i](self.state))
        found = self.visit_cache.get(key)
        if found is None:
            shardings = [self.shardings[self.state[v]] for v in self.op_graph.values[i]]
            found = tuple((e.array, self.shardings.number(e.sharding), e) for e in self.expansions(i, shardings))
            self.visit_cache[key] = found
        if not found:
            self.quiet[i] |= 1 << direction_id
            return []
        values = self.op_graph.values[i]
        changed = []
        for array, number, expansion in found:
            self.state[values[array]] = number
            self.log.append((i, expansion))
            changed.append(values[array])
        return changed

    def expansions(self, i: int, shardings: list[ValueSharding]) -> tuple[Expansion, ...]:
        """Returns what a visit of op i changes if its values have these shardings."""
        if not any(sharding.is_sharded for sharding in shardings):
            return ()
        return expansions(self.op_graph.forms[i], self.level, shardings, self.table.sizes)

    def step(self, value: int, dim: int, atom: int) -> PropagationStep | None:
        """Returns the step that gave a dim of a value, or of its group, an atom; None if an annotation did."""
        at = self.log_index.get((self.graph.representatives[value], dim, atom))
        if at is None:
            return None
        i, expansion = self.log[at]
        origin = next(o for o in expansion.origins if (o.dim, o.atom) == (dim, atom))
        op = self.op_graph.ops[i]
        values = op.operands + op.results
        return PropagationStep(i, values[expansion.array], values[origin.source], origin.source_dim)

    @cached_property
    def log_index(self) -> dict[tuple[int, int, int], int]:
        """(value, dim, atom) -> index of its expansion in the log; plain numbers, since there are many."""
        values = self.op_graph.values
        return {
            (values[i][expansion.array], origin.dim, origin.atom): at
            for at, (i, expansion) in enumerate(self.log)
            for origin in expansion.origins
        }


def _max_ndim(graph: Graph) -> int:
    return max(map(len, graph.shapes), default=0)
