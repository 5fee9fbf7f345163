"""Where an array is resharded: XLA merges equal reshards of one array in one loop, branch or recomputation."""

from __future__ import annotations

from ..graph import Graph, Op, Scope
from ..hardware import Platform
from ..propagation import Assignment
from ..rewrite.invariant_reshards import LOOPS
from ..spec import Spec
from .runs_moved import before_loops, is_moved_outside


class ReshardRegions:
    """The regions of a program's reshards, as a platform's compiler runs them."""

    def __init__(self, assignment: Assignment, platform: Platform):
        self._graph, self._specs = assignment.graph, assignment.specs
        self._platform: Platform = platform
        self._regions, self._exits = self._graph.regions, _exits(self._graph)
        children = (pair for scope in self._graph.scopes() for pair in scope.children_of("scan"))
        self._loop_bodies = {id(eqn): child for eqn, child in children}

    def of(self, op: Op, v: int, have: Spec) -> tuple[int, Scope | None]:
        """The array that is resharded for an op's operand, and the region; None for the whole program.

        Args:
            op: the op.
            v: its operand.
            have: the spec of the operand.
        """
        if is_moved_outside(self._graph, op, v):  # two loops that read one array share it
            edge = self._graph.makers[before_loops(self._graph, op, v, self._platform)]
            region = self._regions.get(id(edge.site[0]))
            return (self._copied(edge.operands[0]) if self._specs[edge.operands[0]].axes == have.axes else v), region
        entered = self._graph.makers.get(v) if op.name == "scan xs" else None
        if entered is not None and self._specs[entered.operands[0]].axes == have.axes:
            return entered.operands[0], self._region(op, v)
        is_row = op.name in ("scan xs", "scan ys")  # a stack is resharded before its loop
        region = self._loop_bodies.get(id(op.site[0])) if is_row and op.site else self._region(op, v)
        return (v if is_row else self._copied(v)), region

    def _copied(self, v: int) -> int:
        """The array that a value is a copy of: XLA:TPU merges reshards of both, which stand in one body to it."""
        maker = self._graph.makers.get(v)
        while self._platform == "tpu" and maker is not None and maker.name == "stop_gradient":
            if self._specs[maker.operands[0]].axes != self._specs[v].axes:
                break
            (v,) = maker.operands
            maker = self._graph.makers.get(v)
        return v

    def _region(self, op: Op, v: int) -> Scope | None:
        if not op.site:
            return None
        around = self._regions.get(id(op.site[0]))
        is_exit = op.name == "edge" and len(op.operands) > 1
        return self._exits.get((id(op.site[0]), op.operands.index(v)), around) if is_exit else around


def _exits(graph: Graph) -> dict[tuple[int, int], Scope]:
    """(id of a loop or conditional, which operand of the edge to a result) -> the body that computes the operand."""
    found: dict[tuple[int, int], Scope] = {}
    for scope in graph.scopes():
        for (i, key, position), child in scope.children.items():
            eqn = scope.jaxpr.eqns[i]
            if eqn.primitive.name == "cond":
                found[id(eqn), position] = child
            elif eqn.primitive.name in LOOPS and key != "cond_jaxpr":
                found[id(eqn), 1] = child  # the first is the initial value
    return found
