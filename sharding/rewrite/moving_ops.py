"""The ops of a program that send something before or after they run: most leave all arrays in place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..graph import Op
from ..propagation import Assignment
from .op_strategy import OpStrategies
from .reshard import Step, chain


def moving_ops(assignment: Assignment) -> Sequence[Op]:
    """The ops with a rule that move or reduce an array, and all edges of loops and branches, in program order."""

    def moving() -> Sequence[Op]:
        strategies = OpStrategies.shared(assignment)
        ops = (op for op in assignment.graph.ops if op.rule is not None and (op.operands or op.results))
        return [op for op in ops if op.name == "edge" or not strategies.of(op).is_in_place]

    return assignment.once("moving ops", moving)


def operand_steps(assignment: Assignment, strategies: OpStrategies, op: Op) -> Iterable[tuple[int, Sequence[Step]]]:
    """Each operand of an op, and the steps that reshard it for the op; those that move, of the edges of bodies."""
    if op.rule is None or not op.operands:
        return ()
    if op.name != "edge":
        return zip(op.operands, strategies.of(op).operand_steps, strict=True)
    graph, specs, sizes = assignment.graph, assignment.specs, assignment.sizes
    want = specs[op.results[0]] if op.site else assignment.boundary_spec(op.results[0])
    moved = [v for v in op.operands if v in graph.times and specs[v].axes != want.axes]
    permutes = not graph.diverges(op)
    return [(v, chain(specs[v], want, graph.shapes[v], graph.itemsize(v), sizes, permutes=permutes)) for v in moved]
