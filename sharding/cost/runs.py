"""How often each computation of a compiled program runs, each time that the program does."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

from ..divergence import rounds_of
from .hlo import Instruction, Module
from .trips import trip_count


class Runs(NamedTuple):
    """How often a computation runs."""

    times: int
    is_counted: bool
    """Whether the trip counts of all loops around it are known; an unknown one is taken as 1."""
    is_conditional: bool
    """Whether it is a branch, or is called in one; every branch is taken as run."""


def runs_of_computations(module: Module) -> dict[str, Runs]:
    """The runs of each computation that the entry reaches, callers first; several calls of one are summed."""
    calls: dict[str, list[tuple[str, _Call]]] = {}
    order: list[str] = []

    def visit(name: str) -> None:
        lines = module.computations[name].values()
        calls[name] = [call for line in lines for call in _calls(module, name, line)]
        for callee, _ in calls[name]:
            if callee not in calls:
                visit(callee)
        order.append(name)

    visit(module.entry)
    runs = {module.entry: Runs(1, True, False)}
    for name in reversed(order):
        own = runs[name]
        for callee, call in calls[name]:
            before = runs.get(callee, Runs(0, True, False))
            runs[callee] = Runs(
                before.times + math.ceil(own.times * call.times),
                before.is_counted and own.is_counted and call.is_counted,
                before.is_conditional or own.is_conditional or call.is_conditional,
            )
    return runs


class _Call(NamedTuple):
    """One call of a computation, as `Runs`, each time that the caller runs."""

    times: Fraction | int
    is_counted: bool
    is_conditional: bool


def _calls(module: Module, computation: str, line: Instruction) -> Iterator[tuple[str, _Call]]:
    """The computations that an instruction calls."""
    if _is_continued(line.opcode):
        return
    trips = _trips(module, computation, line) if line.opcode == "while" else 1
    times = 1 if trips is None else trips
    for key, callee in line.called():
        if callee in module.computations:
            asked = times + 1 if key == "condition" else times  # once more, to find that the loop has ended
            yield callee, _Call(asked, trips is not None, line.opcode == "conditional")


def _trips(module: Module, computation: str, loop: Instruction) -> Fraction | int | None:
    """How often the body of a loop runs, as it shows or as the program says; None where neither does."""
    shown = trip_count(module, computation, loop)
    return rounds_of(loop.op_name.removesuffix("/while")) if shown is None else shown


def _is_continued(opcode: str) -> bool:
    """Whether an instruction is part of an asynchronous call that is counted elsewhere."""
    start, is_start, _ = opcode.rpartition("-start")
    return opcode in ("async-update", "async-done") or bool(is_start and start != "async")
