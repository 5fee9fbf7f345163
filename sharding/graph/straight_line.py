"""Straight-line programs: the equations of a traced function with calls inlined, and slices of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jex

from .. import compat

CALLS = frozenset({"jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2"})
"""Primitives that only call their body.

A stage's forward and backward are separate programs, so recomputation under a checkpoint cannot be merged with the
forward by CSE, and the barrier that prevents it is not needed."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A function of flat arrays as a list of equations, with calls inlined."""

    inputs: tuple[Any, ...]
    eqns: tuple[Any, ...]
    outputs: tuple[Any, ...]
    """Variables or literals."""
    values: dict[Any, Any]
    """Constants by variable."""

    def __call__(self, *arrays: Any) -> list[Any]:
        """Evaluates the outputs."""
        env = dict(self.values)
        env.update(zip(self.inputs, arrays, strict=True))

        def read(atom: Any) -> Any:
            return atom.val if compat.is_literal(atom) else env[atom]

        for eqn in self.eqns:
            env.update(zip(eqn.outvars, compat.bind(eqn, [read(atom) for atom in eqn.invars]), strict=True))
        return [read(atom) for atom in self.outputs]

    def dependents(self, sources: Iterable[Any]) -> set[Any]:
        """The variables that depend on `sources`, including them."""
        found = set(sources)
        for eqn in self.eqns:
            if any(var in found for var in variables(eqn.invars)):
                found.update(eqn.outvars)
        return found

    def required_eqns(self, outputs: Sequence[Any], *, given: Iterable[Any] = ()) -> tuple[Any, ...]:
        """The equations, in order, that compute the outputs from `given` variables."""
        needed, found = set(variables(outputs)) - set(given), []
        for eqn in reversed(self.eqns):
            if needed.intersection(eqn.outvars):
                found.append(eqn)
                needed.update(set(variables(eqn.invars)) - set(given))
        return tuple(reversed(found))

    def subprogram(self, inputs: Sequence[Any], outputs: Sequence[Any], eqns: Sequence[Any]) -> Program:
        """A subset of the equations, as a function of its own."""
        return Program(inputs=tuple(inputs), eqns=tuple(eqns), outputs=tuple(outputs), values=self.values)


def trace_program(function: Callable[..., Sequence[Any]], *shapes: Any) -> Program:
    """Traces `function` for flat arrays of these shapes."""
    jaxpr = jax.make_jaxpr(function)(*shapes)
    eqns: list[Any] = []
    values: dict[Any, Any] = {}
    inner = compat.open_jaxpr(jaxpr)
    values.update(zip(inner.constvars, jaxpr.consts, strict=True))
    renamed: dict[Any, Any] = {}
    _inline(inner, renamed, eqns, values)
    return Program(
        inputs=tuple(inner.invars),
        eqns=tuple(eqns),
        outputs=tuple(_read(renamed, atom) for atom in inner.outvars),
        values=values,
    )


def num_uses(eqns: Iterable[Any], outvars: Iterable[Any]) -> Counter[Any]:
    """How often each variable is read by the equations, or returned."""
    return Counter(variables([*(atom for eqn in eqns for atom in eqn.invars), *outvars]))


def are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two lists hold the same equations."""
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


def variables(atoms: Iterable[Any]) -> list[Any]:
    """The atoms that are not literals."""
    return [atom for atom in atoms if not compat.is_literal(atom)]


def _inline(jaxpr: Any, names: dict[Any, Any], eqns: list[Any], values: dict[Any, Any]) -> None:
    """Appends the equations of a body, with fresh variables."""
    for eqn in jaxpr.eqns:
        bodies = list(compat.sub_jaxprs(eqn.params))
        if eqn.primitive.name in CALLS and len(bodies) == 1:
            body = compat.open_jaxpr(bodies[0][2])
            operands = [_read(names, atom) for atom in eqn.invars]
            inside: dict[Any, Any] = dict(zip(body.invars, operands, strict=True))
            for var, value in zip(body.constvars, compat.constants(bodies[0][2]), strict=True):
                inside[var] = jex.Var(var.aval)
                values[inside[var]] = value
            _inline(body, inside, eqns, values)
            names.update(zip(eqn.outvars, (_read(inside, atom) for atom in body.outvars), strict=True))
            continue
        eqns.append(compat.renamed(eqn, names))


def _read(names: dict[Any, Any], atom: Any) -> Any:
    return atom if compat.is_literal(atom) else names.get(atom, atom)
