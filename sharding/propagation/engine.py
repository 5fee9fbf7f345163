"""The fixed-point engine: extends shardings along factors until nothing changes.

The hierarchy is Shardy's (openxla/shardy, `docs/propagation.md`): user priorities outside, five op priorities inside,
and within one op the aggressive step of `growth.py`. Annotations are never overwritten; inferred dims only ever grow.

The order of visits is that of MLIR's greedy driver, by which Shardy runs, since where claims meet the order decides:
at each level all ops in program order, and after each change the ops around it at once, the latest first. An op that
was quiet is not looked at again before something around it has changed, so that a level costs what it changes.
What a visit finds is kept by the op's form and its splits: a deep model asks the same of every layer.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter

import numpy as np

from ..graph import Graph, pinned
from .atoms import AtomTable
from .growth import Growth, growths
from .network import LEVELS, Network
from .splits import Split, Splits

ALL_GRADES = 0xFF


@dataclass(slots=True)
class Step:
    """Why one dim of one value has an atom: the op that brought it, and the value and dim it came from."""

    op: int
    value: int
    """Which of its group's members the op brought it to."""
    source: int
    source_dim: int


class Engine:
    """The state of one propagation: per value the number of its split, and what has grown in which order."""

    def __init__(self, graph: Graph, table: AtomTable):
        self.graph, self.table = graph, table
        self.pins = pinned(graph)
        self.network = Network.of(graph)
        self.read = [itemgetter(*values) for values in self.network.values]
        self.splits = Splits()
        self.known: dict[tuple, tuple[tuple[int, int, Growth], ...]] = {}
        self.clear()

    def clear(self) -> None:
        """Forgets how the values are split, but not what ops do with splits."""
        nothing = [self.splits.number(Split(((),) * n, (False,) * n)) for n in range(_max_ndim(self.graph) + 1)]
        self.state = [nothing[len(shape)] for shape in self.graph.shapes]
        self.quiet = bytearray([ALL_GRADES]) * len(self.network.ops)  # per op a bit for each grade it was quiet at
        self.log: list[tuple[int, Growth]] = []
        self.level = 0

    def again(self, graph: Graph) -> Engine:
        """An engine for the same graph with other annotations, which knows what this one has found out.

        It goes the whole way anew, since which claim is met first decides between them, but works no step out twice.
        """
        engine = copy.copy(self)
        engine.__dict__.pop("came", None)
        engine.graph, engine.pins = graph, pinned(graph)
        engine.clear()
        return engine

    def split(self, value: int) -> Split:
        """How a value is split now."""
        return self.splits[self.state[self.graph.homes[value]]]

    def run(self) -> None:
        """Propagates all annotations, priority by priority, to the fixed point."""
        later = self.start()
        self.settle()
        for priority in sorted(later):
            for v in later[priority]:
                self.release(v, priority)
            self.settle()

    def start(self) -> dict[int, list[int]]:
        """Lays down the annotations; dims of lower priority wait, and their axes are held for them."""
        later: dict[int, list[int]] = {}
        for v, axes in self.graph.manual.items():
            now = self.split(v)
            self.set(v, Split(now.axes, now.closed, now.held | frozenset(self.table.split(tuple(axes)))))
        for v, pin in self.pins.items():
            axes, closed, held = [], [], set(self.split(v).held)
            for dim in pin.spec.dims:
                waits = dim.priority > 0 and bool(dim.axes or not dim.open)
                if waits:
                    later.setdefault(dim.priority, []).append(v)
                    held.update(self.table.split(dim.axes))
                axes.append(() if waits else self.table.split(dim.axes))
                closed.append(waits or not dim.open)
            self.set(v, Split(tuple(axes), tuple(closed), frozenset(held)))
        return later

    def release(self, v: int, priority: int) -> None:
        """Lays down the dims of one value that have waited for this priority."""
        now = self.split(v)
        axes, closed, held = list(now.axes), list(now.closed), now.held
        for d, dim in enumerate(self.pins[v].spec.dims):
            if dim.priority == priority and (dim.axes or not dim.open):
                axes[d] = self.table.split(dim.axes)
                closed[d] = not dim.open
                held -= set(axes[d])
        self.set(v, Split(tuple(axes), tuple(closed), held))

    def set(self, v: int, split: Split) -> None:
        """Splits a value as an annotation says."""
        v = self.graph.homes[v]
        self.state[v] = self.splits.number(split)
        for i in self.network.around[v]:
            self.quiet[i] = 0

    def settle(self) -> None:
        """Runs the five op priorities, each to its fixed point."""
        for self.level in range(LEVELS):
            while 1 in (waiting := self.waiting()):
                self.sweep(waiting)

    def sweep(self, waiting: bytearray) -> None:
        """Visits the ops that wait, and those around what changes.

        What an edge brings into a loop is seen there in the next sweep only, as the edge is behind the body.
        """
        around, quiet, entered = self.network.around, self.quiet, self.network.entered
        stack: list[int] = []
        at = -1
        while stack or (at := waiting.find(1, at + 1)) >= 0:
            i = stack.pop() if stack else at
            waiting[i] = 0
            for v in self.visit(i):
                first = i if v == entered[i] else 0
                for j in around[v]:
                    quiet[j] = 0
                    if j != i and j >= first and not waiting[j]:
                        waiting[j] = 1
                        if j <= at:  # its turn in program order is over
                            stack.append(j)

    def waiting(self) -> bytearray:
        """Per op 1 where a visit at the present level may find something."""
        grades = self.network.grades[self.level]
        was_quiet = np.right_shift(np.frombuffer(self.quiet, np.uint8), grades) & 1
        return bytearray(((grades > 0) & (was_quiet == 0)).tobytes())

    def visit(self, i: int) -> list[int]:
        """Propagates once through op i; the values that changed."""
        form = self.network.forms[i]
        grade = form.grades[self.level]
        if grade == 0:
            return []
        key = (form.number, grade, self.read[i](self.state))
        found = self.known.get(key)
        if found is None:
            splits = [self.splits[self.state[v]] for v in self.network.values[i]]
            found = tuple((g.array, self.splits.number(g.split), g) for g in self.growths(i, splits))
            self.known[key] = found
        if not found:
            self.quiet[i] |= 1 << grade
            return []
        values = self.network.values[i]
        changed = []
        for array, number, growth in found:
            self.state[values[array]] = number
            self.log.append((i, growth))
            changed.append(values[array])
        return changed

    def growths(self, i: int, splits: list[Split]) -> tuple[Growth, ...]:
        """What a visit of op i changes where its values are split in these ways."""
        if not any(split.is_split for split in splits):
            return ()
        return growths(self.network.forms[i], self.level, splits, self.table.sizes)

    def step(self, value: int, dim: int, atom: int) -> Step | None:
        """Why a dim of a value, or of its group, has an atom; None where an annotation says so."""
        at = self.came.get((self.graph.homes[value], dim, atom))
        if at is None:
            return None
        i, growth = self.log[at]
        origin = next(o for o in growth.origins if (o.dim, o.atom) == (dim, atom))
        op = self.network.ops[i]
        values = op.operands + op.results
        return Step(i, values[growth.array], values[origin.source], origin.source_dim)

    @cached_property
    def came(self) -> dict[tuple[int, int, int], int]:
        """(value, dim, atom) -> the place in the log where it came; nothing but numbers, of which there are many."""
        values = self.network.values
        return {
            (values[i][growth.array], origin.dim, origin.atom): at
            for at, (i, growth) in enumerate(self.log)
            for origin in growth.origins
        }


def _max_ndim(graph: Graph) -> int:
    return max(map(len, graph.shapes), default=0)
