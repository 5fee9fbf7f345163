"""How one op runs on the mesh: what moves before it, what its devices sum up, and what moves after it.

While an op runs, each of its factors is split by some axes and every array has to lie accordingly. Where its arrays
don't agree, something has to move. A `Decision` is the cheapest way: of all choices of one array's split for each
factor in dispute, the one that costs least by what a device sends (`reshard.chain`) and computes.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from . import cost
from .graph import Op
from .propagation import Assignment
from .propagation.atoms import Atoms, AtomTable
from .propagation.growth import project
from .propagation.network import Form
from .propagation.splits import Split
from .reshard import STEP_BYTES, Step, chain, local_bytes
from .rules import Kind, Rule
from .spec import Dim, Spec, num_parts

PRODUCT_BYTES = 2**-12
"""What a link sends while a device does one multiplication and addition of a matrix product (90 GB/s, 460 TFLOP/s)."""
ELEMENT_BYTES = 2**-4
"""What a link sends while a device handles one element of any other op, which its memory bounds."""
MOST_CHOICES, MOST_HOMES = 256, 3

PRODUCT = "dot_general"
"""The op whose sum is scattered where its result is split by axes of the sum; others are summed up whole, then cut."""

FAR = frozenset({"cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum", "split"})
"""Ops that take data farther along a permuted dim than to the next device: it is whole while they run."""

WHOLE = frozenset({"top_k"})
"""Ops that XLA's partitioner runs on whole arrays, for it does not look into them."""

PECULIAR = FAR | WHOLE | {PRODUCT}
"""Ops for which their rule does not say all."""

EXCHANGED = frozenset({Kind.PERMUTE, Kind.REPLICATE})
"""The kinds of factors along which XLA lets neighbours exchange what they lack, by collective-permutes."""

Factors = Mapping[int, Atoms]
"""Factor -> what splits it while the op runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """How one op runs."""

    operands: tuple[tuple[Step, ...], ...]
    """Per operand how it gets to where the op needs it."""
    needs: tuple[Spec, ...]
    """Per operand how it lies then."""
    runs_as: tuple[Spec, ...]
    """Per result how it lies when the op is done."""
    results: tuple[tuple[Step, ...], ...]
    """Per result how it is summed up, and how it gets to where it was decided to lie."""
    told: tuple[bool, ...]
    """Per result whether XLA has to be told how it lies before it moves on; else it goes this way by itself."""

    @property
    def steps(self) -> Iterator[Step]:
        """All of them."""
        return itertools.chain.from_iterable((*self.operands, *self.results))


class Decisions:
    """The decisions for ops over one mesh, each worked out once for all ops that meet in the same way."""

    def __init__(self, assignment: Assignment):
        self.graph, self.specs, self.sizes = assignment.graph, assignment.specs, assignment.sizes
        self.table = AtomTable.of(assignment.sizes)
        self._made = {*self.graph.inputs, *self.graph.makers}
        self._forms: dict[Rule, Form] = {}
        self._known: dict[tuple, Decision] = {}

    def of(self, op: Op) -> Decision:
        """How an op runs that has a rule."""
        assert op.rule is not None
        specs = [self.specs[v] for v in (*op.operands, *op.results)]
        shapes = [self.graph.shapes[v] for v in (*op.operands, *op.results)]
        itemsizes = [self.graph.itemsize(v) for v in (*op.operands, *op.results)]
        free = [v not in self._made for v in op.operands]
        # By identity: the graph keeps its rules, and hashing one is slow.
        kind = op.name if op.name in PECULIAR else ""
        permutes, manual = not self.graph.diverges(op), self.graph.manual.get(op.results[0], frozenset())
        key = (id(op.rule), kind, permutes, manual, tuple(s.axes for s in specs), *shapes, *itemsizes, *free)
        found = self._known.get(key)
        if found is None:
            form = self._forms.setdefault(op.rule, Form.of(0, op.rule, single_use=False, firsts=None))
            found = self._known[key] = _Op(self, form, op, specs, shapes, itemsizes, free, permutes, manual).cheapest()
        return found


@dataclass(slots=True)
class _Op:
    """One op and the choices it has."""

    decisions: Decisions
    form: Form
    op: Op
    specs: Sequence[Spec]
    shapes: Sequence[tuple[int, ...]]
    itemsizes: Sequence[int]
    free: Sequence[bool]
    """Per operand whether it is made where it is used, so that moving it costs nothing."""
    permutes: bool
    """Whether there may be collective-permutes: not where some devices run the op and others don't."""
    manual: frozenset[str]
    """Axes of the `shard_map`s around."""

    def cheapest(self) -> Decision:
        found = [(self.cost(factors, d), d) for factors in self.choices() if (d := self.decision(factors)) is not None]
        if found:
            return min(found, key=lambda pair: pair[0])[1]  # of equal ones the first
        whole = self.decision(dict.fromkeys(range(len(self.form.rule.sizes)), ()))
        assert whole is not None
        return whole

    def choices(self) -> Iterator[Factors]:
        """Every choice of a split for each factor among those that its arrays have, no axis in two factors.

        The results' splits come first, then the operands' in order.
        """
        options = self.options()
        number = 0
        for chosen in itertools.product(*options):
            atoms = list(itertools.chain.from_iterable(chosen))
            if len(set(atoms)) == len(atoms):
                yield dict(enumerate(chosen))
                number += 1
                if number == MOST_CHOICES:
                    return

    def options(self) -> list[list[Atoms]]:
        """Per factor the splits that it may have."""
        rule, n = self.form.rule, self.form.num_operands
        order = [*range(n, len(self.specs)), *(i for i in range(n) if not self.free[i])]
        parts = {i: project(self.form, i, self._split(i), self.decisions.table.sizes) for i in order}
        homeless = dict.fromkeys(a for part in parts.values() for a in sorted(part.overflow))
        options: list[list[Atoms]] = []
        for f in range(len(rule.sizes)):
            seen = dict.fromkeys(part.factors[f] for part in parts.values() if f in part.factors)
            far = rule.kinds[f] is Kind.PERMUTE and (self.op.name in FAR or not self.permutes)
            if self.op.name in WHOLE:
                seen = {}
            elif far or rule.kinds[f] is Kind.REPLICATE or f in rule.blocked:
                homeless.update(dict.fromkeys(itertools.chain.from_iterable(seen)))
                seen = {}
            options.append(list(seen))
        users = Counter(a for seen in options for a in {a for atoms in seen for a in atoms})
        for seen in options:
            disputed = len(seen) > 1 or any(users[a] > 1 for atoms in seen for a in atoms)
            if not seen or (disputed and () not in seen):
                seen.append(())
        self.house(tuple(homeless), options)
        return options

    def house(self, atoms: Atoms, options: list[list[Atoms]]) -> None:
        """Lets axes that no factor of theirs can keep split another one: the data goes there and back."""
        rule, sizes = self.form.rule, self.decisions.table.sizes
        passing = [f for f, kind in enumerate(rule.kinds) if kind is Kind.PASS and f not in rule.blocked]
        for f in sorted(passing, key=lambda f: -rule.sizes[f])[:MOST_HOMES] if atoms else ():
            more = (*options[f][0], *(a for a in atoms if a not in options[f][0]))
            if rule.sizes[f] % math.prod(sizes[a] for a in more) == 0 and more not in options[f]:
                options[f].append(more)

    def _split(self, i: int) -> Split:
        axes = tuple(map(self.decisions.table.split, self.specs[i].axes))
        return Split(axes, (False,) * len(axes))

    def decision(self, factors: Factors) -> Decision | None:
        """What has to move where the factors are split so; None where an array can't lie accordingly."""
        needed = [self.lying(i, factors) for i in range(len(self.specs))]
        if None in needed:
            return None
        n, specs = self.form.num_operands, [s for s in needed if s is not None]
        results = [self.result(i, specs[i], factors) for i in range(n, len(specs))]
        return Decision(
            operands=tuple(() if self.free[i] else self.chain(i, self.specs[i], specs[i]) for i in range(n)),
            needs=tuple(specs[:n]),
            runs_as=tuple(specs[n:]),
            results=tuple(steps for steps, _ in results),
            told=tuple(told for _, told in results),
        )

    def result(self, i: int, spec: Spec, factors: Factors) -> tuple[tuple[Step, ...], bool]:
        """How a result is summed up and brought to where it was decided to lie, and whether XLA has to be told.

        One summed dim after the other, unless it then is cut along axes of the sum alone: then the sum over these comes
        first, as a reduce-scatter, and that over all others at once. Where as many devices have the same to do, XLA
        lets each sum up its part and then changes their places; where it must not, it is summed up whole.
        """
        rule, table = self.form.rule, self.decisions.table
        sums = [factors[f] for f, kind in enumerate(rule.kinds) if kind is Kind.REDUCE and factors[f]]
        after = self.chain(i, spec, self.specs[i])
        cut = tuple(a for step in after for a in table.split(step.axes))
        summed = tuple(a for atoms in sums for a in atoms)
        slices = bool(after) and all(step.kind == "slice" for step in after)
        if not (self.op.name == PRODUCT and slices and set(summed).issuperset(cut)):
            steps = [self.step("all-reduce", atoms, spec, self.held(i, spec)) for atoms in reversed(sums)]
            stays = not self.permutes and not EXCHANGED.isdisjoint(rule.kinds)
            return (*steps, *after), bool(after) and (stays or not (slices and not sums))
        last = after[-1]
        taken = {a for axis in self.manual for a in table.split((axis,))}.union(*factors.values())
        idle = tuple(a for a in range(len(table.sizes)) if a not in taken)
        if idle and not self.permutes:
            return (self.step("all-reduce", summed, spec, self.held(i, spec)), *after), True
        if self.width(idle) == self.width(cut):
            sum_ = self.step("all-reduce", summed, last.spec, last.num_bytes)
            return (sum_, self.step("collective-permute", (*cut, *idle), last.spec, last.num_bytes)), False
        rest = tuple(a for a in summed if a not in cut)
        steps = [self.step("reduce-scatter", cut, last.spec, self.held(i, spec))]
        return (*steps, *([self.step("all-reduce", rest, last.spec, last.num_bytes)] if rest else ())), False

    def width(self, atoms: Atoms) -> int:
        return math.prod(self.decisions.table.sizes[a] for a in atoms)

    def held(self, i: int, spec: Spec) -> int:
        return local_bytes(spec.axes, self.shapes[i], self.itemsizes[i], self.decisions.sizes)

    def step(self, kind: cost.Kind, atoms: Atoms, spec: Spec, held: int) -> Step:
        axes = self.decisions.table.join(atoms)
        sent = cost.wire_bytes(kind, held, num_parts(axes, self.decisions.sizes))
        return Step(kind=kind, axes=axes, spec=spec, num_bytes=held, wire_bytes=sent)

    def chain(self, i: int, have: Spec, want: Spec) -> tuple[Step, ...]:
        if have.axes == want.axes:
            return ()
        return chain(have, want, self.shapes[i], self.itemsizes[i], self.decisions.sizes, permutes=self.permutes)

    def lying(self, i: int, factors: Factors) -> Spec | None:
        """How an array lies where the factors are split so; None where parts of its dims would be strided."""
        table, sizes, dims = self.decisions.table, self.form.rule.sizes, []
        for dim in self.form.arrays[i]:
            atoms: Atoms = ()
            whole_before = False
            for f in dim:
                own = factors[f]
                width = math.prod(table.sizes[a] for a in own)
                if own and (whole_before or (len(dim) > 1 and sizes[f] % width)):
                    return None
                atoms += own
                whole_before = whole_before or width < sizes[f]
            dims.append(Dim(axes=table.join(atoms)))
        return Spec(dims=tuple(dims))

    def cost(self, factors: Factors, decision: Decision) -> float:
        """What a device sends, and computes in the time in which it could send so much."""
        moved = sum(step.wire_bytes + (STEP_BYTES if step.kind != "slice" else 0) for step in decision.steps)
        return moved + self.work(factors)

    def work(self, factors: Factors) -> float:
        rule, table = self.form.rule, self.decisions.table
        lengths = [-(-n // math.prod(table.sizes[a] for a in factors[f])) for f, n in enumerate(rule.sizes)]
        if Kind.REDUCE in rule.kinds and self.form.num_operands > 1:
            return PRODUCT_BYTES * math.prod(lengths)
        return ELEMENT_BYTES * max(math.prod(lengths[f] for dim in dims for f in dim) for dims in self.form.arrays)
