"""Where a value is resharded: in its narrowest dtype, or right behind the sum that it comes from.

Propagation gives all values along a chain of elementwise ops one sharding. So where the op in front of the chain leaves
an array sharded differently from what the op behind it needs, the array may be resharded before it is converted to a
narrower dtype, or behind a conversion to a wider one; and a sum that is scaled before each device keeps its slice is
all-reduced, not reduce-scattered. Compilers for TPUs and GPUs mend some of these. Here each chain around a conversion
or behind a sum is resharded at its cheapest point, and its values get the specs that this implies. How the op in front
of the chain runs, such as a product over a tensor axis, stays as it is.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..graph import Graph, Op
from ..propagation import Assignment, Reason
from ..rules import Kind
from ..spec import Axis, Spec
from .op_strategy import OpStrategies

MOST_VALUES = 8
"""Longest chain of values that is looked at."""


def placed(assignment: Assignment) -> Assignment:
    """The assignment with each chain of ops around a conversion or behind a sum resharded at its cheapest point."""
    search = _Search(assignment)
    moved = {v: spec for op in _seeds(assignment.graph) if search.is_seed(op) for v, spec in search.chain(op)}
    return search.free.with_specs(assignment, search.specs, moved) if moved else assignment


@dataclass(frozen=True, slots=True)
class _Chain:
    """Values with equally many elements, each computed from the one before and used only there."""

    values: Sequence[int]
    ops: Sequence[Op]
    """The op that makes the first value, those between the values, and the op that reads the last one."""


class FreeValues:
    """The values whose specs may change: inferred, and made by ordinary ops."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.fixed = {*graph.annotations, *graph.names.values(), *graph.inputs, *graph.outputs}
        self.fixed.update(v for group in graph.groups for v in group.members)
        self.known = {*graph.inputs, *graph.makers}
        """All values but constants."""

    def __contains__(self, v: int) -> bool:
        op = self.graph.makers.get(v)
        return v not in self.fixed and op is not None and is_written(op)

    def with_specs(self, assignment: Assignment, specs: Sequence[Spec], changed: Container[int]) -> Assignment:
        """An assignment of this program with other specs, and the reasons for those of the values that changed."""

        def find_reason(value: int, dim: int, axis: Axis) -> Reason:
            if value not in changed:
                return assignment.find_reason(value, dim, axis)
            return self.reason(specs, value, dim, axis)

        return dataclasses.replace(assignment, specs=tuple(specs), find_reason=find_reason)

    def reason(self, specs: Sequence[Spec], value: int, dim: int, axis: Axis) -> Reason:
        """Why a value is sharded over an axis: an array of the op before it, or of one that reads it, is."""
        maker = self.graph.makers[value]
        for op in (maker, *self.graph.users[value]):
            for v, d in _same_factor(op, value, dim):
                if v in self.known and axis in specs[v].dims[d].axes:
                    return Reason.of(op, v, d)
        return Reason(word=maker.name, site=maker.site)


def is_written(op: Op) -> bool:
    """Whether an op is one of the program's equations, and has a rule."""
    return op.rule is not None and op.name != "edge" and bool(op.site)


class _Search:
    def __init__(self, assignment: Assignment):
        self.graph, self.sizes = assignment.graph, assignment.sizes
        self.strategies = OpStrategies(assignment)
        self.free = FreeValues(self.graph)

    @property
    def specs(self) -> list[Spec]:
        """The specs so far."""
        return self.strategies.specs

    def is_seed(self, op: Op) -> bool:
        """Whether the bytes to move differ along the chain of one of `_seeds`: sums must be all-reduced."""
        return _is_conversion(op) or any(s.kind == "all-reduce" for s in self.strategies.of(op).result_steps[0])

    def chain(self, seed: Op) -> Iterator[tuple[int, Spec]]:
        """The values of the chain around an op whose specs change; the change is made."""
        found = self.around(seed)
        if found is None or not any(step.kind != "slice" for op in found.ops for step in self.strategies.of(op).steps):
            return
        before = [self.specs[v] for v in found.values]
        best, chosen = self.cost(found), before
        maker, is_passing = found.ops[0], self.passed_on(found.ops[0]) is not None
        operands = self.strategies.of(maker).operand_specs
        made = self.strategies.of(maker).result_steps[maker.results.index(found.values[0])]
        is_scattered = any(step.kind == "reduce-scatter" for step in made)
        for specs in self.candidates(found, before):
            if is_scattered and not _axes(before[0]) <= _axes(specs[0]):
                continue  # a sum is scattered where it is made, so that sums that are added can be reduced at once
            self.assign(found, specs)
            cost, is_same = self.cost(found), self.strategies.of(maker).operand_specs == operands
            if cost < best and (is_same or is_passing):
                best, chosen = cost, specs
        self.assign(found, chosen)
        yield from ((v, new) for v, old, new in zip(found.values, before, chosen, strict=True) if old.axes != new.axes)

    def around(self, seed: Op) -> _Chain | None:
        """The chain around an op; None where no spec may change."""
        values, ops = [], [seed]
        while (source := self.passed_on(ops[0])) is not None and self.is_free(source) and len(values) < MOST_VALUES:
            values.insert(0, source)
            ops.insert(0, self.graph.makers[source])
        (v,) = seed.results
        while self.is_free(v) and len(values) < MOST_VALUES:
            (reader,) = self.graph.users[v]
            values.append(v)
            ops.append(reader)
            if self.passed_on(reader) != v:
                break
            (v,) = reader.results
        return _Chain(values, ops) if values else None

    def is_free(self, v: int) -> bool:
        """Whether the spec of a value may change, and it is passed to one op of the program."""
        return v in self.free and self.graph.num_uses[v] == 1 and is_written(self.graph.users[v][0])

    def passed_on(self, op: Op) -> int | None:
        """The only array that an op computes its result from, if it keeps all of its elements."""
        if op.rule is None or len(op.results) != 1 or any(kind is not Kind.PASS for kind in op.rule.kinds):
            return None
        arrays = [v for v in op.operands if v in self.free.known and self.graph.shapes[v]]
        sizes = {math.prod(self.graph.shapes[v]) for v in (*arrays, *op.results)}
        return arrays[0] if len(arrays) == 1 and len(sizes) == 1 else None

    def candidates(self, chain: _Chain, before: Sequence[Spec]) -> Iterator[list[Spec]]:
        """Specs for all values: the first as their maker leaves them, the last as their reader needs them."""
        made, read, n = self.as_made(chain), self.as_read(chain), len(before)
        for k in range(len(made) + 1):
            for m in range(max(k, n - len(read)), n + 1):
                if k or m < n:
                    yield made[:k] + list(before[k:m]) + read[len(read) - (n - m) :]

    def as_made(self, chain: _Chain) -> list[Spec]:
        """The specs of the first values if each stays sharded as its maker leaves it."""
        first, *between = chain.ops[:-1]
        spec = self.through(first, self.passed_on(first), chain.values[0])
        found = [spec or self.strategies.of(first).result_specs[first.results.index(chain.values[0])]]
        for v, op in zip(chain.values, between, strict=False):
            spec = self.through(op, v, op.results[0], found[-1])
            if spec is None:
                break
            found.append(spec)
        return found

    def as_read(self, chain: _Chain) -> list[Spec]:
        """The specs of the last values if each is sharded as its reader needs it."""
        *between, last = chain.ops[1:]
        spec = self.through(last, last.results[0], chain.values[-1]) if self.passed_on(last) is not None else None
        found = [spec or self.strategies.of(last).operand_specs[last.operands.index(chain.values[-1])]]
        for v, op in zip(reversed(chain.values[:-1]), reversed(between), strict=True):
            spec = self.through(op, op.results[0], v, found[0])
            if spec is None:
                break
            found.insert(0, spec)
        return found

    def through(self, op: Op, source: int | None, target: int, spec: Spec | None = None) -> Spec | None:
        """The spec of an op's array where another one keeps its spec, or the given one, in place; None if it can't."""
        if source is None:
            return None
        arrays = [*op.operands, *op.results]
        return self.strategies.carried(op, arrays.index(source), spec or self.specs[source], arrays.index(target))

    def assign(self, chain: _Chain, specs: Sequence[Spec]) -> None:
        for v, spec in zip(chain.values, specs, strict=True):
            self.strategies.change(v, spec)

    def cost(self, chain: _Chain) -> float:
        """The cost of the chain's ops under the specs so far."""
        return sum(self.strategies.of(op).cost for op in chain.ops)


def _seeds(graph: Graph) -> Sequence[Op]:
    """The ops that convert an array to another size, or sum, however they are sharded."""

    def is_any(op: Op) -> bool:
        if op.rule is None or op.name == "edge" or len(op.results) != 1 or not graph.shapes[op.results[0]]:
            return False
        if _is_conversion(op):
            return graph.itemsize(op.operands[0]) != graph.itemsize(op.results[0])
        return Kind.REDUCE in op.rule.kinds

    return graph.once("conversions and sums", lambda: [op for op in graph.ops if is_any(op)])


def _is_conversion(op: Op) -> bool:
    return op.name == "convert_element_type"


def _axes(spec: Spec) -> set[Axis]:
    return {axis for axes in spec.axes for axis in axes}


def _same_factor(op: Op, value: int, dim: int) -> Iterator[tuple[int, int]]:
    """The (value, dim) of an op's other arrays that have a factor of a value's dim."""
    assert op.rule is not None
    arrays: Mapping[int, Sequence[Sequence[int]]] = dict(
        zip((*op.operands, *op.results), (*op.rule.operands, *op.rule.results), strict=True)
    )
    own = set(arrays[value][dim])
    for v, dims in arrays.items():
        if v != value:
            yield from ((v, d) for d, factors in enumerate(dims) if not own.isdisjoint(factors))
