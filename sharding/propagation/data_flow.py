"""What flows from one dim of an argument: whether it is a dim of the batch.

A dim *flows freely* if what is computed from it is never contracted with, or indexed by, an array that is not computed
from it. Examples of a batch meet only each other (in losses and in gradients of weights); the dims of a weight are
contracted with activations, and the rows of a table are indexed by tokens.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ..graph import Graph, Op
from ..rules import Rule
from .dim_classes import ArrayDim, major_factor


@dataclass(slots=True)
class Flow:
    """What flows from a dim."""

    is_free: bool = True
    contractions: set[int] = field(default_factory=set)
    """Indices of the contractions that read it."""
    met_bytes: int = 0
    """Global bytes of the other operands of these contractions that don't flow from it, such as weights."""
    own_bytes: int = 0
    """Global bytes of the operands and results of the same contractions that do, such as activations."""


@dataclass(frozen=True, eq=False)
class DataFlow:
    """Follows the dims of a graph's arguments forward."""

    graph: Graph
    _known: dict[ArrayDim, Flow] = field(default_factory=dict)

    def of(self, start: ArrayDim) -> Flow:
        """Returns what flows from a dim; all figures are those up to the first fault if it does not flow freely."""
        found = self._known.get(start)
        if found is None:
            found = self._known[start] = self._follow(start)
        return found

    def _follow(self, start: ArrayDim) -> Flow:
        flow, reached = Flow(), {start}
        inside_loops: list[tuple[Op, Rule, ArrayDim]] = []  # what a loop carries may be reached later
        for i, op, rule, at, results in self._steps(reached):
            if i in self.contractions:
                self._count(flow, i, reached)
            if not results and not self._meets_only(op, rule, at, reached):
                if op.times == 1:
                    flow.is_free = False
                    return flow
                inside_loops.append((op, rule, at))
        flow.is_free = all(self._meets_only(op, rule, at, reached) for op, rule, at in inside_loops)
        return flow

    def is_batched(self, start: ArrayDim) -> bool:
        """Whether the first contraction that reads a dim computes along it apart, as along the experts of a mixture."""
        for i, op, rule, at, results in self._steps({start}):
            if i in self.contractions:
                factors, pairs = _factors(op, rule, at), zip(op.operands, rule.operands, strict=True)
                others = [own for v, dims in pairs if v != at[0] for own in dims]
                return bool(results) and any(not factors.isdisjoint(own) for own in others)
        return False

    def _steps(self, reached: set[ArrayDim]) -> Iterator[tuple[int, Op, Rule, ArrayDim, list[ArrayDim]]]:
        """Yields what reads the reached dims, in program order: index, op, rule, operand's dim, and dims of results.

        Adds the latter to `reached`. Ops without a rule of their own end a flow: nothing is known of them.
        """
        graph, waiting = self.graph, sorted({i for v, _ in reached for i in self._users[v]})
        while waiting:
            i = heapq.heappop(waiting)
            while waiting and waiting[0] == i:
                heapq.heappop(waiting)
            op = graph.ops[i]
            if op.rule is None or op.is_unknown:
                continue
            for at in _reached_operands(graph, op, reached):
                results = list(_results(op, op.rule, at))
                for result in results:
                    if result not in reached:
                        reached.add(result)
                        for j in self._users[result[0]]:
                            heapq.heappush(waiting, j)
                yield i, op, op.rule, at, results

    @cached_property
    def contractions(self) -> frozenset[int]:
        """Indices of the ops that contract operands with each other."""
        return frozenset(
            i
            for i, op in enumerate(self.graph.ops)
            if op.rule is not None and not op.is_unknown and _contracts(op.rule)
        )

    @cached_property
    def from_arguments(self) -> set[int]:
        """The values that depend on arguments; the rest, such as the cotangent of a mean, is constant."""
        found = set(self.graph.inputs)
        waiting = list(self.graph.inputs)
        while waiting:
            for i in self._users[waiting.pop()]:
                new = set(self.graph.ops[i].results) - found
                found |= new
                waiting += new
        return found

    @cached_property
    def _users(self) -> Mapping[int, list[int]]:
        users: defaultdict[int, list[int]] = defaultdict(list)
        for i, op in enumerate(self.graph.ops):
            for v in dict.fromkeys(op.operands):
                users[v].append(i)
        return users

    def _count(self, flow: Flow, i: int, reached: set[ArrayDim]) -> None:
        op, num_bytes = self.graph.ops[i], self.graph.num_bytes
        if i in flow.contractions:
            return
        flow.contractions.add(i)
        own = [v for v in op.operands if any((v, d) in reached for d in range(len(self.graph.shapes[v])))]
        met = [v for v in op.operands if v not in own]
        if met:
            flow.met_bytes += op.times * sum(map(num_bytes, met))
            flow.own_bytes += op.times * sum(map(num_bytes, (*own, *op.results)))

    def _meets_only(self, op: Op, rule: Rule, at: ArrayDim, reached: set[ArrayDim]) -> bool:
        """Whether an op that contracts or indexes a dim reads nothing else from arguments but what is `reached`.

        A contraction meets the dims with the same factor, an index every other operand.
        """
        factors = _factors(op, rule, at)
        pairs = zip(op.operands, rule.operands, strict=True)
        others = [(v, dims) for v, dims in pairs if v != at[0] and dims and v in self.from_arguments]
        partners = [(v, d) for v, dims in others for d, own in enumerate(dims) if not factors.isdisjoint(own)]
        if partners:
            return all(partner in reached for partner in partners)
        return all(any((v, d) in reached for d in range(len(dims))) for v, dims in others)


def _contracts(rule: Rule) -> bool:
    kept = {f for dims in rule.results for factors in dims for f in factors}
    summed = [{f for factors in dims for f in factors if f not in kept and rule.sizes[f] > 1} for dims in rule.operands]
    return any(not a.isdisjoint(b) for k, a in enumerate(summed) for b in summed[:k])


def _reached_operands(graph: Graph, op: Op, reached: set[ArrayDim]) -> list[ArrayDim]:
    operands = dict.fromkeys(op.operands)
    return [(v, d) for v in operands for d in range(len(graph.shapes[v])) if (v, d) in reached]


def _factors(op: Op, rule: Rule, at: ArrayDim) -> set[int]:
    value, d = at
    return {major_factor(dims[d], rule) for v, dims in zip(op.operands, rule.operands, strict=True) if v == value}


def _results(op: Op, rule: Rule, at: ArrayDim) -> Iterator[ArrayDim]:
    """Yields the dims of the results that hold the same factor as a dim of an operand."""
    factors = _factors(op, rule, at)
    for v, dims in zip(op.results, rule.results, strict=True):
        for d, own in enumerate(dims):
            if not factors.isdisjoint(own):
                yield v, d
