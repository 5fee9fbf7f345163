"""How an array that a `scan` slices is sharded in the loop.

XLA:GPU would reshard it in every iteration, so what its slices need is done to the whole array before the loop.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..spec import Spec
from .op_strategy import OpStrategies
from .reshard import Step


def scanned_steps(strategies: OpStrategies, stack: int) -> Sequence[Step]:
    """The steps before the loop, from the spec of the array as the loop has it; slices are taken of its rows."""
    op = next(op for op in strategies.graph.users[stack] if op.name == "scan xs")
    (steps,) = strategies.of(op).operand_steps
    return () if all(step.kind == "slice" for step in steps) else steps


def scanned_spec(strategies: OpStrategies, stack: int) -> Spec:
    """The spec of the array in the loop."""
    steps = scanned_steps(strategies, stack)
    return steps[-1].spec if steps else strategies.specs[stack]
