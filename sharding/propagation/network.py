"""The ops of a graph as the engine sees them: each a *form* that many share, with the values it is applied to.

What an op does depends on its form and on how its values are split, not on which values they are. A deep model has
thousands of ops and a few dozen forms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from ..graph import Graph, Op
from ..rules import Dims, Flow, Kind, Rule

NONE, FORWARD, BACKWARD, BOTH = 0, 1, 2, 3
LEVELS = 5
"""Op priorities, from obvious ops to all."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Form:
    """What ops share that do the same to arrays that are split alike."""

    number: int
    rule: Rule
    arrays: tuple[Dims, ...]
    """Per array, operands before results, and per dim its factors."""
    simple: tuple[bool, ...]
    """Per array whether every dim is one factor, so that a dim's split is its factor's."""
    firsts: tuple[int, ...]
    """Per array the first one that is the same value."""
    directions: tuple[tuple[int, ...], ...]
    """Per level and factor which way the factor may flow."""
    grades: tuple[int, ...]
    """Per level a number that levels of equal directions share; 0 where nothing flows."""

    @staticmethod
    def of(number: int, rule: Rule, *, single_use: bool, firsts: tuple[int, ...] | None) -> Form:
        """The form of ops with this rule; `single_use` where nothing else uses the operands."""
        arrays = rule.operands + rule.results
        directions = tuple(_directions(rule, single_use, level) for level in range(LEVELS))
        return Form(
            number=number,
            rule=rule,
            arrays=arrays,
            simple=tuple(all(len(factors) == 1 for factors in dims) for dims in arrays),
            firsts=firsts or tuple(range(len(arrays))),
            directions=directions,
            grades=tuple(1 + directions.index(ways) if any(ways) else 0 for ways in directions),
        )

    @property
    def num_operands(self) -> int:
        return len(self.rule.operands)


def _directions(rule: Rule, single_use: bool, level: int) -> tuple[int, ...]:
    """Which way each factor of a rule may flow at a level."""
    passing, other = _ways(rule.flow, single_use, level)
    found = [passing if kind is Kind.PASS else other for kind in rule.kinds]
    for factor in rule.blocked:
        found[factor] = NONE
    return tuple(found)


def _ways(flow: Flow, single_use: bool, level: int) -> tuple[int, int]:
    """Which way pass-through factors may flow at a level, and which way the others."""
    if flow is Flow.FORWARD or flow is Flow.BACKWARD:
        return (FORWARD, FORWARD) if flow is Flow.FORWARD else (BACKWARD, BACKWARD)
    if level == 4:
        return BOTH, BOTH
    backward_only = BACKWARD if flow is Flow.BROADCAST else BOTH
    if level == 3:
        return backward_only, backward_only
    early = NONE
    if level >= 1 or single_use:
        early = BOTH if flow in (Flow.ELEMENTWISE, Flow.MOVE) else FORWARD if flow is Flow.SLICE else NONE
    return (early | backward_only if level == 2 else early), early


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Network:
    """The ops of a graph that have a rule, op by op in program order, and the ops around each value."""

    ops: tuple[Op, ...]
    forms: tuple[Form, ...]
    """Per op its form."""
    values: tuple[tuple[int, ...], ...]
    """Per op its operands and results; of the members of a group the one that stands for all."""
    around: tuple[list[int], ...]
    """Per value the ops that make it, then those that use it, last one first."""
    grades: np.ndarray
    """[level, op]: the grade of each op at each level."""
    entered: tuple[int, ...]
    """Per op the value that it ties to the argument of a loop's body, which comes before it; -1 for none."""

    @staticmethod
    def of(graph: Graph) -> Network:
        """The network of a graph; annotations make no difference."""
        ops = tuple([op for op in graph.ops if op.rule is not None])
        values = tuple([op.operands + op.results for op in ops])
        if graph.groups:
            values = tuple([tuple(map(graph.homes.__getitem__, arrays)) for arrays in values])
        forms = _forms(ops, values, _shared(graph))
        return Network(
            ops=ops,
            forms=forms,
            values=values,
            around=_around(ops, values, len(graph.shapes)),
            grades=_grades(forms),
            entered=tuple([arrays[-1] if _is_data_flow(op) else -1 for op, arrays in zip(ops, values, strict=True)]),
        )


def _forms(ops: Sequence[Op], values: Sequence[tuple[int, ...]], shared: set[int]) -> tuple[Form, ...]:
    known: dict[tuple, Form] = {}
    forms = []
    for op, arrays in zip(ops, values, strict=True):
        distinct = len(set(arrays)) == len(arrays)
        firsts = None if distinct else tuple(map(arrays.index, arrays))
        single_use = _is_data_flow(op) or shared.isdisjoint(op.operands)
        # By identity: equal rules are one object where the graph comes from `graph.build`, and hashing one is slow.
        key = (id(op.rule), single_use, firsts)
        form = known.get(key)
        if form is None:
            assert op.rule is not None
            form = known[key] = Form.of(len(known), op.rule, single_use=single_use, firsts=firsts)
        forms.append(form)
    return tuple(forms)


def _is_data_flow(op: Op) -> bool:
    """Whether an op is an edge of a loop or branch: to Shardy one array with what it ties, which nothing else uses."""
    return op.name == "optimization_barrier" or (op.name == "edge" and bool(op.site))


def _grades(forms: Sequence[Form]) -> np.ndarray:
    table = np.array([form.grades for form in dict.fromkeys(forms)], np.uint8).reshape(-1, LEVELS)
    numbers = np.fromiter((form.number for form in forms), np.intp, len(forms))
    return table.T[:, numbers]


def _shared(graph: Graph) -> set[int]:
    """The arrays that are several operands; to be in a group counts as a use, as it does to Shardy."""
    uses = [*(op.operands for op in graph.ops), *(group.members for group in graph.groups)]
    counts = Counter(chain.from_iterable(uses))
    return {v for v, count in counts.items() if count > 1 and graph.shapes[v]}


def _around(ops: Sequence[Op], values: Sequence[tuple[int, ...]], num_values: int) -> tuple[list[int], ...]:
    around: tuple[list[int], ...] = tuple([] for _ in range(num_values))
    for i, op in enumerate(ops):
        for v in values[i][len(op.operands) :]:
            around[v].append(i)
    for i in reversed(range(len(ops))):
        for v in values[i][: len(ops[i].operands)]:
            around[v].append(i)
    return around
