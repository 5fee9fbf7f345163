"""An optimizer's update with its state in the host's memory, a group of arrays at a time (ZeRO-Offload).

A group is what has to be on the device together: the state of one parameter where the optimizer treats each for itself,
all of it where every new array depends on every old one. Scalars that depend on several groups, such as a global norm
of them, are computed in a phase of their own, for which the arrays that they need are read once more. Consecutive small
groups are one. The read of a group waits until the last but one is done with, so that the device holds two, one of them
on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from .. import compat
from ..graph.straight_line import Program, trace_program, variables

ACCUMULATING = frozenset({"add", "add_any", "and", "max", "min", "mul", "or"})
"""Ops by which a program folds scalars one by one."""

Values = dict[Any, Any]
"""Variable of a jaxpr -> array."""


def streamed(update: Callable[[Any], tuple[Any, Any]], state: Any) -> tuple[Any, Any]:
    """`update(state)`, computed group by group.

    Args:
        update: a state whose arrays are in the host's memory -> any results, and the next state, in the host's memory.
        state: the state before the update.
    """
    leaves, tree = jax.tree.flatten(state)
    results: list[Any] = []  # the tree of the results, once traced

    def flat(*leaves: Any) -> list[Any]:
        found, structure = jax.tree.flatten(update(jax.tree.unflatten(tree, leaves)))
        results.append(structure)
        return found

    program = trace_program(flat, *leaves)
    values = program.values | dict(zip(program.inputs, leaves, strict=True))
    found = _Dependence(program, [v for v in program.inputs if v.aval.ndim])
    tokens: list[list[Any]] = []
    for phase in range(found.num_phases):
        _run(found.common(phase), values)
        for group in _packed(found.groups(phase)):
            own = dict(zip(group.arrays, _behind([values[v] for v in group.arrays], tokens), strict=True))
            _run(group.eqns, own, values)
            made = {v: own[v] for v in group.results}
            values.update(made)
            tokens.append([*made.values()])
    return jax.tree.unflatten(results[0], [_read(atom, values) for atom in program.outputs])


@dataclass(slots=True, kw_only=True)
class _Group:
    """Arrays of the state, what is computed of them, and the equations that do it."""

    arrays: list[Any] = field(default_factory=list)
    eqns: list[Any] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return sum(v.aval.size * v.aval.dtype.itemsize for v in self.arrays)


class _Dependence:
    """What each variable of an update depends on: one group of arrays, or none, and scalars of how many phases."""

    def __init__(self, program: Program, arrays: Sequence[Any]):
        self.eqns, self.arrays, self.outputs = program.eqns, arrays, variables(program.outputs)
        self.parent = {v: v for v in arrays}  # a forest: the arrays of one group have one root
        self.origin = dict(self.parent)  # variable -> an array of the one group that it depends on
        self.phase: dict[Any, int] = {}
        self.joined: list[Any] = []  # scalars of single groups that scalars of several are computed from
        for eqn in program.eqns:
            self._add(eqn)

    @property
    def num_phases(self) -> int:
        """Phases of the update; the last one computes its results."""
        return 1 + max(self.phase.values(), default=0)

    def common(self, phase: int) -> list[Any]:
        """The equations of a phase that depend on no group."""
        found = [eqn for eqn in self.eqns if not any(v in self.origin for v in eqn.outvars)]
        return [eqn for eqn in found if self._phase(eqn.outvars) == phase and not self._is_effect(eqn)]

    def groups(self, phase: int) -> list[_Group]:
        """What a phase computes of each group: scalars for later phases, at last the results of the update."""
        is_last = phase == self.num_phases - 1
        wanted = self.outputs if is_last else [v for v in self.joined if self.phase.get(v, 0) == phase]
        wanted = dict.fromkeys(v for v in wanted if v in self.origin)
        needed, eqns = {*wanted}, []
        for eqn in reversed(self.eqns):
            if not needed.isdisjoint(eqn.outvars) or (is_last and self._is_effect(eqn)):
                needed.update(v for v in variables(eqn.invars) if v in self.origin)
                eqns.append(eqn)
        groups = {self._root(v): _Group() for v in self.arrays if v in needed}
        for v in self.arrays:
            if v in needed:
                groups[self._root(v)].arrays.append(v)
        for eqn in reversed(eqns):
            groups[self._root(next(v for v in variables(eqn.invars) if v in self.origin))].eqns.append(eqn)
        for v in wanted:
            groups[self._root(v)].results.append(v)
        return list(groups.values())

    def _add(self, eqn: Any) -> None:
        operands = variables(eqn.invars)
        dependent = [v for v in operands if v in self.origin]
        roots = [*dict.fromkeys(map(self._root, dependent))]
        phase = self._phase(operands)
        if self._joins(eqn, dependent, len(roots)):
            self.joined += dependent
            phase, roots = max(phase, self._phase(dependent) + 1), []
        for one in roots[1:]:
            self.parent[one] = roots[0]
        self.phase.update(dict.fromkeys(eqn.outvars, phase))
        self.origin.update(dict.fromkeys(eqn.outvars, roots[0]) if roots else ())

    def _joins(self, eqn: Any, dependent: Sequence[Any], num_groups: int) -> bool:
        """Whether an equation takes scalars of several groups, or adds one to a sum of those of others."""
        if not dependent or any(v.aval.size > 1 for v in dependent) or compat.has_side_effects(eqn):
            return False
        adds = eqn.primitive.name in ACCUMULATING and len(dependent) < len(variables(eqn.invars))
        return num_groups > 1 or (
            adds and any(self.phase.get(v, 0) for v in variables(eqn.invars) if v not in self.origin)
        )

    def _is_effect(self, eqn: Any) -> bool:
        return compat.has_side_effects(eqn) and any(v in self.origin for v in variables(eqn.invars))

    def _phase(self, variables: Collection[Any]) -> int:
        return max((self.phase.get(v, 0) for v in variables), default=0)

    def _root(self, v: Any) -> Any:
        v = self.origin[v]
        while self.parent[v] is not v:
            self.parent[v] = v = self.parent[self.parent[v]]  # in this order: the parent of the old v
        return v


def _packed(groups: Sequence[_Group]) -> list[_Group]:
    """Consecutive groups in one while they are no larger together than the largest."""
    limit, found = max((group.num_bytes for group in groups), default=0), list[_Group]()
    for group in groups:
        if not found or found[-1].num_bytes + group.num_bytes > limit:
            found.append(group)
            continue
        found[-1].arrays += group.arrays
        found[-1].eqns += group.eqns
        found[-1].results += group.results
    return found


def _behind(arrays: list[Any], tokens: Sequence[Any]) -> list[Any]:
    """The arrays, to be read once the results of the last group but one are there.

    Every read is behind a barrier: what XLA:TPU (libtpu 0.0.52) computes from an array that is also read directly, it
    may move to the host.
    """
    return jax.lax.optimization_barrier((arrays, *tokens[-2:-1]))[0]


def _run(eqns: Sequence[Any], values: Values, others: Mapping[Any, Any] | None = None) -> None:
    """Adds the results of the equations to `values`."""
    for eqn in eqns:
        results = compat.bind(eqn, [_read(atom, values, others) for atom in eqn.invars])
        values.update(zip(eqn.outvars, results, strict=True))


def _read(atom: Any, values: Mapping[Any, Any], others: Mapping[Any, Any] | None = None) -> Any:
    if compat.is_literal(atom):
        return atom.val
    return values[atom] if others is None or atom in values else others[atom]
