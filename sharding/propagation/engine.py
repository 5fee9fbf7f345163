"""The fixed-point engine: extends shardings along factors until nothing changes.

The hierarchy is Shardy's (openxla/shardy, `docs/propagation.md`): user priorities outside, five op priorities inside,
and within one op the aggressive step: every factor takes the longest axes that its arrays agree on, conflicts between
factors go to the larger source. Annotations are never overwritten; an inferred dim only ever grows. A worklist
holds the ops whose arrays changed, so a sweep costs what it changes. What an op does depends on its rule and on how its
arrays are split now, and a deep model asks the same of every layer: it is worked out once and looked up from then on.

Arrays are indices and splits are tuples of atoms (`atoms.py`) in flat lists; the objects come back at the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..graph import Graph, Op
from ..rules import Flow, Kind
from .atoms import Atoms, AtomTable

NONE, FORWARD, BACKWARD, BOTH = 0, 1, 2, 3
LEVELS = 5


@dataclass(slots=True)
class Step:
    """Why one dim of one value has an atom: the op that brought it, and the value and dim it came from."""

    op: int
    source: int
    source_dim: int


@dataclass(slots=True)
class Growth:
    """One array of one op that takes more atoms, as a visit finds it."""

    tensor: int
    dims: list[tuple[int, Atoms, list[tuple[int, int, int]]]]
    """Per dim that grows: the dim, its atoms from now on, and of each new one (atom, array and dim it came from)."""


@dataclass(slots=True)
class Tensor:
    """One array of one op: its value and per dim its factors."""

    value: int
    dims: tuple[tuple[int, ...], ...]
    simple: bool
    """Whether every dim is one factor, so that a dim's split is its factor's."""


class Engine:
    """The state of one propagation: per value and dim the atoms so far, closed or not, and why."""

    def __init__(self, graph: Graph, table: AtomTable):
        self.graph, self.table = graph, table
        n = len(graph.shapes)
        self.axes: list[list[Atoms]] = [[()] * len(s) for s in graph.shapes]
        self.closed: list[list[bool]] = [[False] * len(s) for s in graph.shapes]
        self.held: list[frozenset[int]] = [frozenset()] * n  # atoms promised to a dim of lower priority
        self.split: list[bool] = [False] * n  # whether any dim has atoms
        self.why: dict[tuple[int, int, int], Step] = {}
        self.ops = [op for op in graph.ops if op.rule is not None]
        self.tensors = [_tensors(op) for op in self.ops]
        self.users: list[list[int]] = [[] for _ in range(n)]
        self.makers: list[list[int]] = [[] for _ in range(n)]
        for i, op in enumerate(self.ops):
            for v in op.operands:
                self.users[v].append(i)
            for v in op.results:
                self.makers[v].append(i)
        counts = [0] * n
        for op in graph.ops:
            for v in op.operands:
                counts[v] += 1
        self.single_use = [all(counts[v] == 1 or not graph.shapes[v] for v in op.operands) for op in self.ops]
        self.level = 0
        self.forms = _interned(map(_form, self.ops))
        self.states: dict[tuple, int] = {}
        self.state = [self.state_of(v) for v in range(n)]
        self.known: dict[tuple[int, ...], list[Growth]] = {}

    def state_of(self, v: int) -> int:
        """A number for how a value is split now: equal for values of which every op would make the same."""
        key = (*self.axes[v], *self.closed[v], self.held[v])
        return self.states.setdefault(key, len(self.states))

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
        for v, pin in self.graph.pins.items():
            held: set[int] = set()
            for d, dim in enumerate(pin.spec.dims):
                waits = dim.priority > 0 and bool(dim.axes or not dim.open)
                if waits:
                    later.setdefault(dim.priority, []).append(v)
                    held.update(self.table.split(dim.axes))
                self.axes[v][d] = () if waits else self.table.split(dim.axes)
                self.closed[v][d] = waits or not dim.open
            self.held[v] = frozenset(held)
            self.split[v] = any(self.axes[v])
            self.state[v] = self.state_of(v)
        return later

    def release(self, v: int, priority: int) -> None:
        """Lays down the dims of one value that have waited for this priority."""
        for d, dim in enumerate(self.graph.pins[v].spec.dims):
            if dim.priority == priority:
                self.axes[v][d] = self.table.split(dim.axes)
                self.closed[v][d] = not dim.open
                self.held[v] -= set(self.axes[v][d])
        self.split[v] = any(self.axes[v])
        self.state[v] = self.state_of(v)

    def settle(self) -> None:
        """Runs the five op priorities, each to its fixed point."""
        for self.level in range(LEVELS):
            stack = list(range(len(self.ops) - 1, -1, -1))
            queued = set(stack)
            while stack:
                i = stack.pop()
                queued.discard(i)
                for v in self.visit(i):
                    for j in (*self.makers[v], *reversed(self.users[v])):
                        if j != i and j not in queued:
                            queued.add(j)
                            stack.append(j)

    def touched(self, i: int) -> bool:
        split = self.split
        return any(split[t.value] for t in self.tensors[i])

    def direction(self, i: int, factor: int) -> int:
        """Which way a factor may flow through an op at the present level."""
        op, level = self.ops[i], self.level
        rule = op.rule
        assert rule is not None
        if factor in rule.blocked:
            return NONE
        if level == 4:
            return BOTH
        backward_only = BACKWARD if rule.flow is Flow.BROADCAST else BOTH
        if level == 3:
            return backward_only
        allowed = NONE
        if level == 2 and rule.kinds[factor] is Kind.PASS:
            allowed = backward_only
        if level >= 1 or self.single_use[i]:
            if rule.flow in (Flow.ELEMENTWISE, Flow.MOVE):
                allowed = BOTH
            elif rule.flow is Flow.SLICE:
                allowed |= FORWARD
        return allowed

    def grade(self, i: int) -> int:
        """A number that two levels share where an op's directions are the same on both; 0 where nothing flows."""
        rule, level = self.ops[i].rule, self.level
        assert rule is not None
        if rule.flow in (Flow.ELEMENTWISE, Flow.MOVE):
            return 1 if level >= 1 or self.single_use[i] else 0
        if level <= 1:
            return 1 if rule.flow is Flow.SLICE and (level == 1 or self.single_use[i]) else 0
        return level if rule.flow is Flow.BROADCAST else min(level, 3)

    def visit(self, i: int) -> list[int]:
        """Propagates once through op i; the values that changed."""
        grade, tensors = self.grade(i), self.tensors[i]
        if grade == 0:
            return []
        state = self.state
        key = (self.forms[i], grade, *[state[t.value] for t in tensors])
        growths = self.known.get(key)
        if growths is None:
            growths = self.known[key] = self.growths(i) if self.touched(i) else []
        return [self.grow(i, growth) for growth in growths]

    def grow(self, i: int, growth: Growth) -> int:
        """Writes down what op i brings to one of its arrays; the value that it is."""
        tensors = self.tensors[i]
        v = tensors[growth.tensor].value
        for d, atoms, origins in growth.dims:
            self.axes[v][d] = atoms
            for atom, source, source_dim in origins:
                self.why[v, d, atom] = Step(i, tensors[source].value, source_dim)
        self.split[v] = True
        self.state[v] = self.state_of(v)
        return v

    def growths(self, i: int) -> list[Growth]:
        """What a visit of op i changes."""
        tensors, op = self.tensors[i], self.ops[i]
        rule, n = op.rule, len(op.operands)
        assert rule is not None
        parts = [self.project(t, rule.sizes) for t in tensors]
        wanted: dict[int, Atoms] = {}
        for factor in range(len(rule.sizes)):
            axes = self.agreed(parts, factor, n, self.direction(i, factor))
            if axes:
                wanted[factor] = axes
        if not wanted:
            return []
        order, sources = self.order(wanted, parts, rule.sizes, rule.flow is Flow.ELEMENTWISE)
        grown: dict[int, list[int]] = {}
        for t in (*range(n, len(tensors)), *range(n)):
            for factor in order:
                new = self.fitting(wanted[factor], factor, tensors[t], parts[t], rule.sizes)
                if new and t < n and rule.flow is Flow.ELEMENTWISE:
                    new = _no_further_than(new, factor, parts[n:])
                if new and _extends(new, parts[t][0][factor]):
                    parts[t][0][factor] = new
                    grown.setdefault(t, []).append(factor)
        origins = {f: (t, _dim_of(f, tensors[t])) for f, t in sources.items()}
        axes_now = {t.value: list(self.axes[t.value]) for t in tensors}  # one value may be two of the arrays
        found = []
        for t in sorted(grown):
            dims = self.grown_dims(tensors[t], grown[t], parts[t], rule.sizes, origins, axes_now[tensors[t].value])
            if dims:
                found.append(Growth(t, dims))
        return found

    def project(self, t: Tensor, sizes: Sequence[int]) -> tuple[dict[int, Atoms], frozenset[int], set[int]]:
        """An array's split per factor; the atoms that fit no factor; the factors closed to growth."""
        axes, closed = self.axes[t.value], self.closed[t.value]
        if t.simple:
            return (
                {f[0]: axes[d] for d, f in enumerate(t.dims)},
                frozenset(),
                {f[0] for d, f in enumerate(t.dims) if closed[d]},
            )
        factors: dict[int, Atoms] = {}
        overflow: set[int] = set()
        shut: set[int] = set()
        for d, dim in enumerate(t.dims):
            rest, over = axes[d], False
            for k, f in enumerate(dim):
                if closed[d] or over:
                    shut.add(f)
                if over or k == len(dim) - 1:
                    factors[f] = () if over else rest
                    rest = ()
                    continue
                room, taken = sizes[f], 0
                while taken < len(rest) and room % self.table.sizes[rest[taken]] == 0:
                    room //= self.table.sizes[rest[taken]]
                    taken += 1
                factors[f], rest = rest[:taken], rest[taken:]
                if room > 1 and rest:
                    overflow.update(rest)
                    shut.add(f)
                    over, rest = True, ()
        return factors, frozenset(overflow), shut

    def agreed(self, parts: Sequence, factor: int, n: int, direction: int) -> Atoms:
        """The longest axes of a factor that its arrays agree on, major first."""
        if direction == NONE:
            return ()
        groups = (parts[:n], parts[n:]) if direction != BACKWARD else (parts[n:], parts[:n])
        axes: Atoms = ()
        grow = True
        for second, group in enumerate(groups):
            grow = grow and not (second and direction != BOTH)
            for factors, _, _ in group:
                new = factors.get(factor)
                if new is None or new == axes:
                    continue
                k = min(len(axes), len(new))
                if axes[:k] != new[:k]:
                    k = next(i for i in range(k) if axes[i] != new[i])
                    axes, grow = axes[:k], False
                elif len(new) > k and grow:
                    axes = new
        return axes

    def order(
        self, wanted: dict[int, Atoms], parts: Sequence, sizes: Sequence[int], flat: bool
    ) -> tuple[list[int], dict[int, int]]:
        """Factors in the order in which they may claim axes, and the array that each one's axes come from.

        Larger source first; for elementwise ops the more split factor; then the earlier array and factor.
        """
        totals = [math.prod(sizes[f] for f in factors) for factors, _, _ in parts]
        sources, keys = {}, {}
        for f, axes in wanted.items():
            holders = [t for t, (factors, _, _) in enumerate(parts) if factors.get(f, ())[: len(axes)] == axes]
            sources[f] = max(holders, key=lambda t: (totals[t], -t))
            width = math.prod(self.table.sizes[a] for a in axes) if flat else 1
            keys[f] = (-totals[sources[f]], -width, sources[f], f)
        return sorted(wanted, key=keys.__getitem__), sources

    def fitting(self, axes: Atoms, factor: int, t: Tensor, part: tuple, sizes: Sequence[int]) -> Atoms:
        """The head of `axes` that one array can take for a factor; empty if it wouldn't grow."""
        factors, overflow, shut = part
        have = factors.get(factor)
        if have is None or not _extends(axes, have):
            return ()
        held = self.held[t.value]
        if factor in shut and not have:
            return ()
        minor = t.simple or any(dim[-1] == factor for dim in t.dims)
        used = set(overflow)
        for f, a in factors.items():
            if f != factor:
                used.update(a)
        taken, room = 0, sizes[factor]
        for k, atom in enumerate(axes):
            size = self.table.sizes[atom]
            fits = k < len(have) or (factor not in shut and (minor or room % size == 0))
            if not fits or atom in held or atom in used:
                break
            room = room // size if room % size == 0 else 0
            taken += 1
        return axes[:taken] if taken > len(have) else ()

    def grown_dims(
        self,
        tensor: Tensor,
        factors: list[int],
        part: tuple,
        sizes: Sequence[int],
        origins: dict[int, tuple[int, int]],
        axes: list[Atoms],
    ) -> list[tuple[int, Atoms, list[tuple[int, int, int]]]]:
        """An array's dims whose factors have grown, as in `Growth`; `axes`, what they have now, is brought up to it."""
        split, overflow, _ = part
        found = []
        for d, dim in enumerate(tensor.dims):
            if overflow or not any(f in factors for f in dim):
                continue
            old, new = axes[d], self.dim_axes(dim, split, sizes)
            if not _extends(new, old):
                continue
            axes[d] = new
            came = [(atom, *origins[next(f for f in dim if atom in split[f])]) for atom in new[len(old) :]]
            found.append((d, new, came))
        return found

    def dim_axes(self, dim: tuple[int, ...], split: dict[int, Atoms], sizes: Sequence[int]) -> Atoms:
        axes: Atoms = ()
        for f in dim:
            axes += split[f]
            if math.prod(self.table.sizes[a] for a in split[f]) < sizes[f]:
                break  # a minor factor split under a whole major one would be a strided view
        return axes


def _tensors(op: Op) -> list[Tensor]:
    assert op.rule is not None
    pairs = zip((*op.operands, *op.results), (*op.rule.operands, *op.rule.results), strict=True)
    return [Tensor(v, dims, all(len(d) == 1 for d in dims)) for v, dims in pairs]


def _form(op: Op) -> tuple:
    """What two ops share that do the same to arrays that are split alike: the rule, and which arrays are one value."""
    values = (*op.operands, *op.results)
    return op.rule, tuple(values.index(v) for v in values)


def _interned(keys: Iterable[Any]) -> list[int]:
    numbers: dict[Any, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def _dim_of(factor: int, tensor: Tensor) -> int:
    return next(d for d, dim in enumerate(tensor.dims) if factor in dim)


def _extends(new: Atoms, old: Atoms) -> bool:
    return len(new) > len(old) and new[: len(old)] == old


def _no_further_than(new: Atoms, factor: int, results: Sequence) -> Atoms:
    """Keeps a split from going sideways between operands where the result can't take it."""
    for factors, _, _ in results:
        have = factors.get(factor)
        if have is not None and _extends(new, have):
            new = have
    return new
