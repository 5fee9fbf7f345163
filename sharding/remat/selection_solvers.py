"""Which values of a program to save for its backward: exactly, as a mixed-integer program, and greedily."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from .linearized_program import Key, Program

Algorithm = Literal["exact", "greedy"]


class Plan(NamedTuple):
    """What is saved, and what that takes."""

    saved: frozenset[Key]
    num_bytes: int
    flops: float
    """Of the ops that run again."""


Solver = Callable[[Program, Sequence[Key], float], Plan]


def plan(program: Program, saved: Collection[Key]) -> Plan:
    """What saving the values of some keys takes: the ops run again that lead from them to the values needed."""
    kept, again, waiting = set[int](), set[int](), list(program.needed)
    makers = program.makers()
    while waiting:
        value = waiting.pop()
        op = program.ops[makers[value]]
        if op.is_saveable and op.key in saved:
            kept.add(value)
        elif makers[value] not in again:
            again.add(makers[value])
            waiting += op.operands
    forward, waiting = set(program.forward), list(kept)
    while waiting:
        maker = makers[waiting.pop()]
        if maker not in forward:
            forward.add(maker)
            waiting += program.ops[maker].operands
    num_bytes = sum(program.num_bytes[value] for value in kept)
    return Plan(frozenset(saved), num_bytes, sum(program.ops[number].flops for number in again & forward))


def greedy(program: Program, keys: Sequence[Key], memory_bytes: float) -> Plan:
    """Saves the values of one key after the other: the one that avoids most FLOPs per byte and still fits."""
    best = plan(program, ())
    left = list(keys)
    while True:
        options = [(plan(program, best.saved | {key}), key) for key in left]
        gains = [
            ((best.flops - one.flops) / max(one.num_bytes - best.num_bytes, 1e-9), number)
            for number, (one, _) in enumerate(options)
            if one.num_bytes <= memory_bytes and one.flops < best.flops
        ]
        if not gains:
            return best
        best, key = options[max(gains, key=lambda gain: (gain[0], -gain[1]))[1]]
        left.remove(key)


def exact(program: Program, keys: Sequence[Key], memory_bytes: float) -> Plan:
    """The values that leave least to run again, by HiGHS.

    Variables: s_k = 1 if the values of key k are saved; h_v = 1 if value v takes memory; b_o, f_o, t_o = 1 if op o runs
    in the backward, in the forward, in both. Minimise the FLOPs of t, subject to

        b_o >= 1 - s_k,  h_v >= s_k                  value v of op o, with key k, that the linear part reads
        b_p >= b_o - s_k,  h_v >= s_k + b_o - 1      operand v of op o, which op p with key k makes
        f_o >= h_v for its values,  f_p >= f_o       o runs forward for what is saved (f_o = 1 if results need it)
        t_o >= b_o + f_o - 1
        sum of bytes of h <= memory_bytes

    Only s are integers: with them, the least of the others are.
    """
    from scipy import optimize, sparse

    ops, values, places = program.ops, len(program.num_bytes), {key: place for place, key in enumerate(keys)}
    offsets = np.cumsum([0, len(keys), values, len(ops), len(ops), len(ops)])
    held, backward, forward, twice, count = offsets[1:].tolist()
    rows, makers = _Rows(), program.makers()
    for number, op in enumerate(ops):
        place = places.get(op.key) if op.is_saveable else None
        for value in op.results:
            rows.add(0, {forward + number: 1, held + value: -1})
            if value in program.needed:
                rows.add(1, {backward + number: 1, place: 1})
                rows.add(0, {held + value: 1, place: -1} if place is not None else {})
        for value in op.operands:
            maker = makers[value]
            place = places.get(ops[maker].key) if ops[maker].is_saveable else None
            rows.add(0, {backward + maker: 1, place: 1, backward + number: -1})
            rows.add(-1, {held + value: 1, place: -1, backward + number: -1} if place is not None else {})
            rows.add(0, {forward + maker: 1, forward + number: -1})
        rows.add(-1, {twice + number: 1, backward + number: -1, forward + number: -1})
    sizes, flops, lower = np.zeros(count), np.zeros(count), np.zeros(count)
    sizes[held:backward] = program.num_bytes
    flops[twice:] = [op.flops for op in ops]
    lower[[forward + number for number in program.forward]] = 1
    unit = max(memory_bytes, 1.0)
    bounds: tuple[Any, Any] = (rows.least, lower)  # SciPy's annotations have numbers only
    matrix = sparse.csr_array((rows.values, (rows.rows, rows.columns)), shape=(len(rows.least), count))
    found = optimize.milp(
        flops / max(flops.max(initial=0.0), 1.0) + 1e-9 * sizes / unit,
        constraints=[
            optimize.LinearConstraint(matrix, bounds[0], np.inf),
            optimize.LinearConstraint(sizes[None] / unit, -np.inf, memory_bytes / unit),
        ],
        integrality=np.arange(count) < len(keys),
        bounds=optimize.Bounds(bounds[1], 1),
        options={"mip_rel_gap": 0},
    )
    return plan(program, [key for key, value in zip(keys, found.x, strict=False) if value > 0.5])


class _Rows:
    """Rows of `sum of coefficients x variables >= least`."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.columns: list[int] = []
        self.values: list[float] = []
        self.least: list[float] = []

    def add(self, least: float, terms: Mapping[int | None, float]) -> None:
        """Adds a row; a term without a variable is zero."""
        present = {column: value for column, value in terms.items() if column is not None}
        self.rows += [len(self.least)] * len(present)
        self.columns += present
        self.values += present.values()
        self.least.append(least)


SOLVERS: dict[Algorithm, Solver] = {"exact": exact, "greedy": greedy}
