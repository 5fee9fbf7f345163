"""Updates that are gathered before they are added to whole weights, rather than the new weights.

Where the optimizer's state is sharded and the weights are not (ZeRO's first stage; Rajbhandari et al., SC 2020,
1910.02054, section 5), propagation shards their sum, and gathers it as a result of the program. To gather the updates
sends as much. XLA:TPU copies results that a gather makes, and donated arguments whose buffers they take, so that it
would store all weights twice; sums are written over the weights, one array of updates at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..graph import Op
from ..propagation import Assignment
from ..rules import Kind
from ..spec import Spec
from .op_strategy import OpStrategies
from .reshard import chain_cost
from .reshard_placement import FreeValues

MOST_OPS = 8
"""Longest chain of elementwise ops on whole arrays that are computed whole."""


def gathered_early(assignment: Assignment) -> Assignment:
    """The assignment with gathers of results in front of the elementwise ops that make them.

    These are ops all of whose operands but one are there as the result needs them, or computed from such ones; the last
    one may have no more bytes than the result.
    """
    search = _Search(assignment)
    made = {v: k for k, op in enumerate(assignment.graph.ops) for v in op.results}
    edges = [op for op in assignment.graph.ops if search.is_gathered_result(op)]
    moved = {v for edge in sorted(edges, key=lambda op: made.get(op.operands[0], -1)) for v in search.moved(edge)}
    return search.free.with_specs(assignment, search.specs, moved) if moved else assignment


class _Search:
    def __init__(self, assignment: Assignment):
        self.graph = assignment.graph
        self.strategies = OpStrategies(assignment)
        self.free = FreeValues(self.graph)
        self.results = set(self.graph.outputs)

    @property
    def specs(self) -> list[Spec]:
        """The specs so far."""
        return self.strategies.specs

    def is_gathered_result(self, op: Op) -> bool:
        """Whether an op leaves a value as a result of the program, and that takes an all-gather."""
        if op.name != "edge" or op.site or op.rule is None or self.results.isdisjoint(op.results):
            return False
        return any(step.kind == "all-gather" for step in self.strategies.of(op).steps)

    def moved(self, edge: Op) -> Sequence[int]:
        """The values in front of a result that get its spec; none if its gather stays."""
        (value,), target = edge.operands, self.specs[edge.results[0]]
        arrays = self.elementwise(value)
        whole = {v: chain for v in arrays if (chain := self.whole(v, target)) is not None}
        gathered = [v for v in arrays if v not in whole]
        if len(arrays) < 2 or len(gathered) > 1 or not all(self.may_be_gathered(v, value) for v in gathered):
            return ()
        changed = [value, *gathered, *(v for chain in whole.values() for v in chain)]
        ops = list({id(op): op for v in changed for op in (self.graph.makers[v], *self.graph.users[v])}.values())
        if any(op.rule is None for op in ops):
            return ()
        before, sent = [self.specs[v] for v in changed], self.sent(ops)
        self.assign(changed, [target] * len(changed))
        if self.sent(ops) <= sent and not self.sent([edge]):
            return changed
        self.assign(changed, before)
        return ()

    def elementwise(self, v: int) -> Sequence[int]:
        """The arrays that a value is computed from, if its spec may change and all have its shape."""
        if v not in self.free:
            return ()
        op = self.graph.makers[v]
        assert op.rule is not None
        if len(op.results) != 1 or any(kind is not Kind.PASS for kind in op.rule.kinds):
            return ()
        arrays = dict.fromkeys(x for x in op.operands if x in self.free.known and self.graph.shapes[x])
        return list(arrays) if all(self.graph.shapes[x] == self.graph.shapes[v] for x in arrays) else ()

    def whole(self, v: int, target: Spec, depth: int = MOST_OPS) -> list[int] | None:
        """The values that get the target's spec so that this one is there with it; None if one must be gathered."""
        if self.specs[v].axes == target.axes:
            return []
        arrays = self.elementwise(v)
        if not arrays or not depth or self.graph.num_uses[v] != 1:
            return None
        found = [v]
        for x in arrays:
            chain = self.whole(x, target, depth - 1)
            if chain is None:
                return None
            found += chain
        return found

    def may_be_gathered(self, v: int, value: int) -> bool:
        """Whether an array can get another spec, is no larger than a value, and only the op that makes it reads it."""
        is_read_once = v in self.free and self.graph.num_uses[v] == 1
        return is_read_once and self.graph.itemsize(v) <= self.graph.itemsize(value)

    def assign(self, values: Sequence[int], specs: Sequence[Spec]) -> None:
        for v, spec in zip(values, specs, strict=True):
            self.strategies.change(v, spec)

    def sent(self, ops: Sequence[Op]) -> float:
        """The cost of what a device sends for these ops."""
        strategies = map(self.strategies.of, ops)
        return sum(chain_cost(steps) for one in strategies for steps in (*one.operand_steps, *one.result_steps))
