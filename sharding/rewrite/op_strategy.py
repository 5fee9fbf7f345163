"""Op strategies: the resharding of an op's operands, its reductions, and the resharding of its results.

While an op runs, each of its factors is sharded over some axes, which fixes the sharding of every array. Where its
arrays disagree, some must be resharded. An `OpStrategy` is the cheapest choice: of the shardings that the arrays have
for each disputed factor, the one that minimises what a device sends (`reshard.chain`) and computes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from .. import cost
from ..graph import Op
from ..propagation import Assignment
from ..propagation.axis_atoms import Atoms, AtomTable
from ..propagation.factor_propagation import project
from ..propagation.interned_shardings import ValueSharding
from ..propagation.propagation_graph import OpForm
from ..rules import ON_SHARDS, Kind, Rule
from ..spec import Dim, Spec, byte_cost, local_bytes, num_parts, occupied
from .op_kind import (
    LONG_RANGE,
    ON_EQUAL_SHARDS,
    PADDED_FIRST,
    PER_ITERATION,
    REDUCE_SCATTERED,
    REGROUPING,
    OpKind,
    op_kinds,
)
from .reshard import Step, chain, chain_cost
from .sliding_windows import WINDOWS

OperandSteps = Callable[[Op], Iterable[tuple[int, Sequence[Step]]]]
"""An op, or an edge of a loop or branch -> each operand that it reshards, and how."""

BYTES_PER_MULTIPLY_ADD = 2**-12
"""Bytes that a link sends during one multiply-add of a matrix product on the device (90 GB/s, 460 TFLOP/s)."""
BYTES_PER_ELEMENT = 2**-4
"""Bytes that a link sends while the device processes one element of any other op, which is memory-bound."""
MAX_CANDIDATES, MAX_MOVED_TO = 256, 3
"""Most choices of factor shardings compared, and most factors tried for axes that an op cannot keep in place."""

HALO_KINDS = frozenset({Kind.PERMUTE, Kind.REPLICATE})
"""The kinds of factors along which XLA exchanges halos between neighbours, by collective-permutes."""

Factors = Mapping[int, Atoms]
"""Factor -> the atoms it is sharded over while the op runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpStrategy:
    """How one op runs: resharding before it, the shardings while it runs, reductions and resharding after it."""

    operand_steps: tuple[tuple[Step, ...], ...]
    """For each operand, the steps from its spec to `operand_specs`."""
    operand_specs: tuple[Spec, ...]
    """The spec of each operand while the op runs."""
    result_specs: tuple[Spec, ...]
    """The spec of each result when the op is done."""
    result_steps: tuple[tuple[Step, ...], ...]
    """For each result, its reductions and the steps from `result_specs` to its spec."""
    constrained: tuple[bool, ...]
    """Whether each result needs a constraint to `result_specs`; otherwise XLA takes these steps by itself."""
    cost: float = 0.0
    """The bytes that a device sends, plus its computation in bytes that it could send meanwhile."""

    is_cut_short: bool = False
    """Whether not all candidates were compared."""
    needed: tuple[Spec, ...]
    """The spec of each operand that agrees with how the op runs, which XLA reads shards of other operands by."""
    is_in_place: bool = field(init=False, repr=False, compare=False)
    """Whether nothing is moved or reduced."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_in_place", not any(self.operand_steps) and not any(self.result_steps))

    @property
    def steps(self) -> Iterator[Step]:
        """All steps."""
        return itertools.chain.from_iterable((*self.operand_steps, *self.result_steps))

    def planned(self, found: Sequence[Spec | None]) -> list[Spec | None]:
        """Returns the specs of operands and results while the op runs, instead of those found; None is left to XLA."""
        n, planned = len(self.operand_specs), list(found)
        for k, need in enumerate(self.operand_specs):
            planned[k] = need if found[k] is not None or any(need.axes) else None
        for k, (need, constrained) in enumerate(zip(self.result_specs, self.constrained, strict=True), start=n):
            planned[k] = need if constrained and found[k] is not None else found[k]
        return planned


class OpStrategies:
    """The strategies of a program's ops, each computed once for all ops of one kind with equal specs."""

    def __init__(self, assignment: Assignment):
        self.graph, self.sizes = assignment.graph, assignment.sizes
        self.specs = list(assignment.specs)
        """The specs so far, for `change` to replace."""
        self.table = AtomTable.of(assignment.sizes)
        self._kinds = op_kinds(self.graph)
        self._forms: dict[Rule, OpForm] = {}
        self._of: dict[int, OpStrategy] = {}
        """id of an op -> its strategy under the specs so far."""
        self._cache: dict[tuple, OpStrategy] = {}
        self._cache_of_same: dict[tuple[int, ...], OpStrategy] = {}
        """By the kind of an op and the identities of its specs."""
        self._replaced: list[Spec] = []
        """Keeps the specs that `change` replaced, so that no other one has their identities."""
        self._searches = assignment.searches

    @staticmethod
    def shared(assignment: Assignment) -> OpStrategies:
        """Those of a program for all who change no spec."""
        return assignment.once("strategies", lambda: OpStrategies(assignment))

    def of(self, op: Op) -> OpStrategy:
        """Returns the strategy of an op that has a rule."""
        found = self._of.get(id(op))
        if found is None:
            found = self._of[id(op)] = self._alike(op)
        return found

    def change(self, v: int, spec: Spec) -> None:
        """Gives a value another spec."""
        if spec is self.specs[v]:
            return
        self._replaced.append(self.specs[v])
        self.specs[v] = spec
        for op in (self.graph.makers.get(v), *self.graph.users.get(v, ())):
            self._of.pop(id(op), None)

    def _alike(self, op: Op) -> OpStrategy:
        assert op.rule is not None
        number, kind, head = self._kinds[id(op)]
        specs = [self.specs[v] for v in (*op.operands, *op.results)]
        same = (number, *map(id, specs))
        found = self._cache_of_same.get(same)
        if found is not None:
            return found
        axes = tuple([s.axes for s in specs])
        found = self._cache.get((number, axes))
        if found is None:
            text = f"{head} {axes}"
            if text not in self._searches:
                self._searches[text] = _StrategySearch(self, self._form(op.rule), op, specs, kind).cheapest()
            found = self._cache[number, axes] = self._searches[text]
        self._cache_of_same[same] = found
        return found

    def _form(self, rule: Rule) -> OpForm:
        return self._forms.setdefault(rule, OpForm.of(0, rule, single_use=False, firsts=None))

    def carried(self, op: Op, source: int, spec: Spec, target: int) -> Spec | None:
        """Returns the spec of an op's array where another one's spec stays in place; None if it can't.

        Args:
            op: an op that has a rule.
            source: the index of the array with the given spec, operands before results.
            spec: its spec.
            target: the index of the array asked for.
        """
        assert op.rule is not None
        form = self._form(op.rule)
        projected = project(form, source, _sharding(spec, self.table), self.table.sizes)
        if projected.overflow:
            return None
        factors = {f: projected.factors.get(f, ()) for f in range(len(op.rule.sizes))}
        return _spec(form, target, factors, self.table)


@dataclass(slots=True)
class _StrategySearch:
    """The search for the cheapest strategy of one op."""

    strategies: OpStrategies
    form: OpForm
    op: Op
    specs: Sequence[Spec]
    kind: OpKind
    is_cut_short: bool = False
    """Whether there were more candidates than are compared."""

    def cheapest(self) -> OpStrategy:
        found = [strategy for factors in self.candidates() if (strategy := self.strategy(factors)) is not None]
        replicated = dict.fromkeys(range(len(self.form.rule.sizes)), ())
        best = min(found, key=lambda strategy: strategy.cost) if found else self.strategy(replicated)  # first of equals
        assert best is not None
        return dataclasses.replace(best, is_cut_short=self.is_cut_short)

    def candidates(self) -> Iterator[Factors]:
        """Yields every choice, for each factor, of one of its arrays' shardings, with no axis in two factors.

        The results' shardings come first, then the operands' in order.
        """
        options = self.options()
        number = 0
        for chosen in itertools.product(*options):
            atoms = list(itertools.chain.from_iterable(chosen))
            if len(set(atoms)) == len(atoms):
                if number == MAX_CANDIDATES:
                    self.is_cut_short = True
                    return
                yield dict(enumerate(chosen))
                number += 1

    def options(self) -> list[list[Atoms]]:
        """Returns the candidate shardings of each factor."""
        rule, n = self.form.rule, self.form.num_operands
        order = [*range(n, len(self.specs)), *(i for i in range(n) if not self.kind.free[i])]
        if self.strategies.graph.changes_memory(self.op):  # it is resharded on the device
            order = order[:1] if self.op.results[0] in self.strategies.graph.memory_kinds else order[1:]
        table = self.strategies.table
        projected = {i: project(self.form, i, _sharding(self.specs[i], table), table.sizes) for i in order}
        displaced = dict.fromkeys(a for one in projected.values() for a in sorted(one.overflow))
        kept = {f for dims in rule.results for factors in dims for f in factors}
        lost = {f for f, kind in enumerate(rule.kinds) if kind is Kind.PASS and f not in kept}
        dropped = {f for f in lost if rule.sizes[f] == 1}
        if self.op.name in REGROUPING:
            dropped = lost | (kept - {f for dims in rule.operands for factors in dims for f in factors})
        options: list[list[Atoms]] = []
        for f in range(len(rule.sizes)):
            seen = dict.fromkeys(one.factors[f] for one in projected.values() if f in one.factors)
            long_range = rule.kinds[f] is Kind.PERMUTE and (self.op.name in LONG_RANGE or not self.kind.permutes)
            if self.op.name in ON_EQUAL_SHARDS:
                seen = dict.fromkeys(atoms for atoms in seen if self.is_shardable(rule.sizes[f], atoms))
            if long_range or rule.kinds[f] is Kind.REPLICATE or f in rule.blocked or f in dropped:
                displaced.update(dict.fromkeys(itertools.chain.from_iterable(seen)))
                seen = {}
            options.append(list(seen))
        users = Counter(a for seen in options for a in {a for atoms in seen for a in atoms})
        for seen in options:
            disputed = len(seen) > 1 or any(users[a] > 1 for atoms in seen for a in atoms)
            if not seen or (disputed and () not in seen):
                seen.append(())
        if self.op.name not in PER_ITERATION:
            self.add_moved(tuple(displaced), dropped, options)
        return options

    def is_shardable(self, size: int, atoms: Atoms) -> bool:
        """Whether a function can run on shards of a dim, which must be equal."""
        table = self.strategies.table
        is_whole = all(isinstance(axis, str) for axis in table.axes_of(atoms))
        return is_whole and size % math.prod(table.sizes[a] for a in atoms) == 0

    def add_moved(self, atoms: Atoms, dropped: Collection[int], options: list[list[Atoms]]) -> None:
        """Adds options that move axes, which their own factors cannot keep, to other factors while the op runs."""
        rule, sizes = self.form.rule, self.strategies.table.sizes
        fixed = rule.blocked | {*dropped}
        passing = [f for f, kind in enumerate(rule.kinds) if kind is Kind.PASS and f not in fixed]
        for f in sorted(passing, key=lambda f: -rule.sizes[f])[:MAX_MOVED_TO] if atoms else ():
            more = (*options[f][0], *(a for a in atoms if a not in options[f][0]))
            if rule.sizes[f] % math.prod(sizes[a] for a in more) == 0 and more not in options[f]:
                options[f].append(more)

    def strategy(self, factors: Factors) -> OpStrategy | None:
        """Returns the strategy with the given factor shardings; None if an array cannot be sharded accordingly.

        Or if an operand would be moved to a spec that leaves devices without elements.
        """
        found = [_spec(self.form, i, factors, self.strategies.table) for i in range(len(self.specs))]
        if None in found:
            return None
        n, specs = self.form.num_operands, [s for s in found if s is not None]
        moved = (i for i in range(n) if not self.kind.free[i] and specs[i].axes != self.specs[i].axes)
        if any(occupied(specs[i], self.kind.shapes[i], self.strategies.sizes) is not specs[i] for i in moved):
            return None
        results = [self.result(i, specs[i], factors) for i in range(n, len(specs))]
        needed = tuple(specs[:n])
        steps = [() if self.kind.free[i] else self.chain(i, self.specs[i], specs[i]) for i in range(n)]
        if n and steps[0] and all(step.kind == "slice" for step in steps[0]) and self.is_replicated_along_windows():
            if self.op.name == "slice":
                return None  # XLA would shard the operand, then exchange halos
            steps[0], specs[0] = (), self.specs[0]
        found = OpStrategy(
            operand_steps=tuple(steps),
            operand_specs=tuple(specs[:n]),
            result_specs=tuple(specs[n:]),
            result_steps=tuple(steps for steps, _ in results),
            constrained=tuple(constrained for _, constrained in results),
            needed=needed,
        )
        return dataclasses.replace(found, cost=self.cost(factors, found))

    def is_replicated_along_windows(self) -> bool:
        """Whether the operand is replicated along all dims that a pad, slice or pooling slides over, or a `rev` turns.

        XLA then pads it on each device, where it would exchange halos after slicing it.
        """
        if self.op.name == "rev":
            return not any(self.specs[0].dims[d].axes for d in self.op.site[0].params["dimensions"])
        if self.op.name not in PADDED_FIRST:
            return False
        sliding = (w for w in WINDOWS[self.op.name](self.op.site[0].params, self.kind.shapes) if not w.is_trivial)
        return not any(self.specs[0].dims[w.dim].axes for w in sliding)

    def result(self, i: int, spec: Spec, factors: Factors) -> tuple[tuple[Step, ...], bool]:
        """Returns the steps that reduce a result and reshard it to its spec, and whether it needs a constraint first.

        One all-reduce per summed factor, unless the result is then sliced along axes of the sum alone: then it is
        reduce-scattered over these, and all-reduced over all others at once. If as many devices, or a multiple, run
        redundantly, XLA all-reduces the shards and then collective-permutes them; if permutes are not allowed, it
        all-reduces the full result.

        XLA runs an op as its result is sharded, so that it would exchange shards even of replicated operands.
        """
        rule, table = self.form.rule, self.strategies.table
        own = {f for dim in self.form.arrays[i] for f in dim}
        sums = [factors[f] for f, kind in enumerate(rule.kinds) if kind is Kind.REDUCE and factors[f] and f not in own]
        if self.op.name in ON_SHARDS and sums:  # one `psum`
            sums = [tuple(a for atoms in sums for a in atoms)]
        after = self.chain(i, spec, self.specs[i])
        sliced = tuple(a for step in after for a in table.atoms_of(step.axes))
        summed = tuple(a for atoms in sums for a in atoms)
        slices_only = bool(after) and all(step.kind == "slice" for step in after)
        if not (self.op.name == REDUCE_SCATTERED and slices_only and set(summed).issuperset(sliced)):
            steps = [self.step("all-reduce", atoms, spec, self.shard_bytes(i, spec)) for atoms in reversed(sums)]
            no_halo = not self.kind.permutes and not HALO_KINDS.isdisjoint(rule.kinds)
            regroups = self.op.name in REGROUPING and bool(after)
            shifts = regroups or any(
                old != new and any(rule.kinds[f] in HALO_KINDS for f in factors_of)
                for old, new, factors_of in zip(spec.axes, self.specs[i].axes, self.form.arrays[i], strict=True)
            )
            takes_slices = slices_only and not sums and self.op.name != "custom_partitioning"
            return (*steps, *after), bool(after) and (no_halo or shifts or not takes_slices)
        last, num_bytes = after[-1], self.shard_bytes(i, spec)
        rest = tuple(a for a in summed if a not in sliced)
        if not rest:
            return (self.step("reduce-scatter", sliced, last.spec, num_bytes),), True
        taken = {a for axis in self.kind.manual for a in table.atoms_of((axis,))}.union(*factors.values())
        idle = tuple(a for a in range(len(table.sizes)) if a not in taken)
        changed = [bool(old) for old, new in zip(spec.axes, self.specs[i].axes, strict=True) if old != new]
        if (idle and not self.kind.permutes) or changed != [False]:
            return (self.step("all-reduce", summed, spec, num_bytes), *after), True
        if idle and self.num_devices(idle) % self.num_devices(sliced) == 0:
            sum_ = self.step("all-reduce", summed, last.spec, last.num_bytes)
            return (sum_, self.step("collective-permute", (*sliced, *idle), last.spec, last.num_bytes)), False
        scattered = self.step("reduce-scatter", sliced, last.spec, num_bytes)
        return (scattered, self.step("all-reduce", rest, last.spec, last.num_bytes)), False

    def num_devices(self, atoms: Atoms) -> int:
        return math.prod(self.strategies.table.sizes[a] for a in atoms)

    def shard_bytes(self, i: int, spec: Spec) -> int:
        return local_bytes(spec.axes, self.kind.shapes[i], self.kind.itemsizes[i], self.strategies.sizes)

    def step(self, kind: cost.Kind, atoms: Atoms, spec: Spec, num_bytes: int) -> Step:
        axes = self.strategies.table.axes_of(atoms)
        sent = cost.wire_bytes(kind, num_bytes, num_parts(axes, self.strategies.sizes))
        is_sum = kind in cost.SUMS
        size = {"num_bytes": num_bytes, "wire_bytes": sent, "byte_cost": byte_cost(axes, self.strategies.sizes)}
        return Step(kind=kind, axes=axes, spec=spec, is_sum=is_sum, **size)

    def chain(self, i: int, have: Spec, want: Spec) -> tuple[Step, ...]:
        if have.axes == want.axes:
            return ()
        return chain(
            have, want, self.kind.shapes[i], self.kind.itemsizes[i], self.strategies.sizes, permutes=self.kind.permutes
        )

    def cost(self, factors: Factors, strategy: OpStrategy) -> float:
        """Returns the bytes that a device sends, plus its computation in bytes that it could send meanwhile."""
        shares = self.kind.alike or itertools.repeat(1)
        moved = sum(chain_cost(steps) / n for steps, n in zip(strategy.operand_steps, shares, strict=False))
        return moved + sum(map(chain_cost, strategy.result_steps)) + self.work(factors)

    def work(self, factors: Factors) -> float:
        rule, table = self.form.rule, self.strategies.table
        lengths = [-(-n // math.prod(table.sizes[a] for a in factors[f])) for f, n in enumerate(rule.sizes)]
        if Kind.REDUCE in rule.kinds and self.form.num_operands > 1:
            return BYTES_PER_MULTIPLY_ADD * math.prod(lengths)
        return BYTES_PER_ELEMENT * max(math.prod(lengths[f] for dim in dims for f in dim) for dims in self.form.arrays)


def _spec(form: OpForm, array: int, factors: Factors, table: AtomTable) -> Spec | None:
    """Returns the spec of an array under the given factor shardings; None if its shards would be strided."""
    sizes, dims = form.rule.sizes, []
    for dim in form.arrays[array]:
        atoms: Atoms = ()
        partial_major = False
        for f in dim:
            own = factors[f]
            width = math.prod(table.sizes[a] for a in own)
            if own and (partial_major or (len(dim) > 1 and sizes[f] % width)):
                return None
            atoms += own
            partial_major = partial_major or width < sizes[f]
        dims.append(Dim(axes=table.axes_of(atoms)))
    return Spec(dims=tuple(dims))


def _sharding(spec: Spec, table: AtomTable) -> ValueSharding:
    axes = tuple(map(table.atoms_of, spec.axes))
    return ValueSharding(axes, (False,) * len(axes))
