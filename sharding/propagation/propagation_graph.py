"""The op graph that the engine runs on: ops by *form*, and the ops adjacent to each value.

Propagation through an op depends on its form and its values' shardings, not on which values they are. A deep model
has thousands of ops and a few dozen forms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from ..graph import Graph, Op
from ..rules import Dims, Rule
from .op_priorities import LEVELS, factor_directions


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpForm:
    """The part of an op that determines propagation; ops of one form propagate equal shardings identically."""

    number: int
    rule: Rule
    arrays: tuple[Dims, ...]
    """The factors of each dim of each array, operands before results."""
    simple: tuple[bool, ...]
    """Whether each array has one factor per dim, so that a dim's sharding is that of its factor."""
    firsts: tuple[int, ...]
    """For each array, the first array that is the same value."""
    directions: tuple[tuple[int, ...], ...]
    """For each level and factor, the directions in which it propagates."""
    direction_ids: tuple[int, ...]
    """For each level a number, equal for levels of equal directions; 0 if no factor propagates."""

    @staticmethod
    def of(number: int, rule: Rule, *, single_use: bool, firsts: tuple[int, ...] | None) -> OpForm:
        """Returns the form of ops with a rule; `single_use` if no other op uses their operands."""
        arrays = rule.operands + rule.results
        directions = tuple(factor_directions(rule, single_use, level) for level in range(LEVELS))
        return OpForm(
            number=number,
            rule=rule,
            arrays=arrays,
            simple=tuple(all(len(factors) == 1 for factors in dims) for dims in arrays),
            firsts=firsts or tuple(range(len(arrays))),
            directions=directions,
            direction_ids=tuple(1 + directions.index(row) if any(row) else 0 for row in directions),
        )

    @property
    def num_operands(self) -> int:
        return len(self.rule.operands)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PropagationGraph:
    """The ops of a graph that have a rule, in program order, and the ops adjacent to each value."""

    ops: tuple[Op, ...]
    forms: tuple[OpForm, ...]
    """The form of each op."""
    values: tuple[tuple[int, ...], ...]
    """The operands and results of each op; for members of a group, its representative."""
    adjacent: tuple[list[int], ...]
    """For each value, the ops that produce it, then its users, last one first."""
    direction_ids: np.ndarray
    """[level, op]: the direction id of each op at each level."""
    loop_arguments: tuple[int, ...]
    """For each edge of a loop or branch, its target, which the body before it reads; -1 for other ops."""

    @staticmethod
    def of(graph: Graph) -> PropagationGraph:
        """Returns the op graph of a graph; independent of annotations."""
        ops = tuple([op for op in graph.ops if not op.is_unknown])
        values = tuple([op.operands + op.results for op in ops])
        if graph.groups:
            values = tuple([tuple(map(graph.representatives.__getitem__, arrays)) for arrays in values])
        forms = _forms(ops, values, _multi_use(graph))
        return PropagationGraph(
            ops=ops,
            forms=forms,
            values=values,
            adjacent=_adjacent(ops, values, len(graph.shapes)),
            direction_ids=_direction_ids(forms),
            loop_arguments=tuple([v[-1] if _is_data_flow(op) else -1 for op, v in zip(ops, values, strict=True)]),
        )


def _forms(ops: Sequence[Op], values: Sequence[tuple[int, ...]], multi_use: set[int]) -> tuple[OpForm, ...]:
    known: dict[tuple, OpForm] = {}
    forms = []
    for op, arrays in zip(ops, values, strict=True):
        distinct = len(set(arrays)) == len(arrays)
        firsts = None if distinct else tuple(map(arrays.index, arrays))
        single_use = _is_data_flow(op) or multi_use.isdisjoint(op.operands)
        # By identity: equal rules are one object where the graph comes from `graph.build`, and hashing one is slow.
        key = (id(op.rule), single_use, firsts)
        form = known.get(key)
        if form is None:
            assert op.rule is not None
            form = known[key] = OpForm.of(len(known), op.rule, single_use=single_use, firsts=firsts)
        forms.append(form)
    return tuple(forms)


def _is_data_flow(op: Op) -> bool:
    """Whether an op is an edge of a loop or branch: Shardy sees one array with all it ties and no other user."""
    return op.name == "optimization_barrier" or (op.name == "edge" and bool(op.site))


def _direction_ids(forms: Sequence[OpForm]) -> np.ndarray:
    table = np.array([form.direction_ids for form in dict.fromkeys(forms)], np.uint8).reshape(-1, LEVELS)
    numbers = np.fromiter((form.number for form in forms), np.intp, len(forms))
    return table.T[:, numbers]


def _multi_use(graph: Graph) -> set[int]:
    """Returns the non-scalar values with several uses; membership in a group is a use, as in Shardy."""
    uses = [*(op.operands for op in graph.ops), *(group.members for group in graph.groups)]
    counts = Counter(chain.from_iterable(uses))
    return {v for v, count in counts.items() if count > 1 and graph.shapes[v]}


def _adjacent(ops: Sequence[Op], values: Sequence[tuple[int, ...]], num_values: int) -> tuple[list[int], ...]:
    adjacent: tuple[list[int], ...] = tuple([] for _ in range(num_values))
    for i, op in enumerate(ops):
        for v in values[i][len(op.operands) :]:
            adjacent[v].append(i)
    for i in reversed(range(len(ops))):
        for v in values[i][: len(ops[i].operands)]:
            adjacent[v].append(i)
    return adjacent
