"""Execution counts of HLO computations per call of the program."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

from ..annotations.divergent_control_flow import declared_trip_count
from .hlo import Instruction, Module
from .trip_counts import trip_count


class ExecutionCount(NamedTuple):
    """Executions of a computation per call of the program."""

    times: int
    is_counted: bool
    """Whether the trip counts of all enclosing loops are known; an unknown one is taken as 1."""
    is_conditional: bool
    """Whether it is a branch of a conditional, or called from one; every branch is assumed to run."""


def execution_counts(module: Module) -> dict[str, ExecutionCount]:
    """The count of each computation reachable from the entry, callers first; counts of several calls add up."""
    calls: dict[str, list[tuple[str, _CallCount]]] = {}
    order: list[str] = []

    def visit(name: str) -> None:
        lines = module.computations[name].values()
        calls[name] = [call for line in lines for call in _calls(module, name, line)]
        for callee, _ in calls[name]:
            if callee not in calls:
                visit(callee)
        order.append(name)

    visit(module.entry)
    counts = {module.entry: ExecutionCount(1, True, False)}
    for name in reversed(order):
        caller = counts[name]
        for callee, call in calls[name]:
            before = counts.get(callee, ExecutionCount(0, True, False))
            counts[callee] = ExecutionCount(
                before.times + math.ceil(caller.times * call.times),
                before.is_counted and caller.is_counted and call.is_counted,
                before.is_conditional or caller.is_conditional or call.is_conditional,
            )
    return counts


class _CallCount(NamedTuple):
    """Executions of a callee by one instruction, per execution of the caller."""

    times: Fraction | int
    is_counted: bool
    is_conditional: bool


def _calls(module: Module, computation: str, line: Instruction) -> Iterator[tuple[str, _CallCount]]:
    """The computations that an instruction calls."""
    if _is_async_continuation(line.opcode):
        return
    trips = _trip_count(module, computation, line) if line.opcode == "while" else 1
    count = 1 if trips is None else trips
    for key, callee in line.called():
        if callee in module.computations:
            own_count = count + 1 if key == "condition" else count  # the last evaluation ends the loop
            yield callee, _CallCount(own_count, trips is not None, line.opcode == "conditional")


def _trip_count(module: Module, computation: str, loop: Instruction) -> Fraction | int | None:
    """The trip count of a loop, from the HLO or else from the program's annotations; None if unknown."""
    count = trip_count(module, computation, loop)
    return declared_trip_count(loop.op_name.removesuffix("/while")) if count is None else count


def _is_async_continuation(opcode: str) -> bool:
    """Whether an instruction belongs to an asynchronous op whose call is counted elsewhere."""
    start, is_start, _ = opcode.rpartition("-start")
    return opcode in ("async-update", "async-done") or bool(is_start and start != "async")
