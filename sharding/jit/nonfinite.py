"""Origins of non-finite values: the equations that made the infinities and nans which reach a program's results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from .. import compat, paths
from ..graph.graph import Site, line

_CALLS = ("jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call")
"""Equations to recurse into; a loop or a branch counts as one equation."""

Kind = Literal["nan", "inf"]
KINDS: tuple[Kind, ...] = ("nan", "inf")


@dataclass(frozen=True, kw_only=True)
class Origin:
    """A non-finite value computed from finite ones and constants, or a nan computed from infinities."""

    kind: Kind
    value: str
    """An argument's path, or dtype, shape, op and source line of a result."""

    def __str__(self) -> str:
        return f"{self.kind} in {self.value}"


def origins(f: Callable[..., Any], *args: Any, names: Sequence[str] = (), limit: int = 3) -> list[Origin]:
    """The first values that make a result of `f(*args)` non-finite: arguments, or results of its equations.

    Evaluates the program again, equation by equation on the devices of the arguments. Returns the first nan that a
    result comes from, after the infinities that it comes from; else the first infinities that a result comes from.
    Nothing where all results are finite: a mask of infinities that a softmax makes zeros is no fault.

    Args:
        f: a traceable function of pytrees of arrays.
        *args: its arguments.
        names: names of the arguments, for their paths; `args/0` and so on for those without.
        limit: maximum number of values.
    """
    prefixes = [*names, *(f"args/{i}" for i in range(len(names), len(args)))]
    leaf_names = [name for prefix, arg in zip(prefixes, args, strict=True) for name in paths.of_tree(arg, prefix)]
    return of_program(jax.make_jaxpr(f)(*args), jax.tree.leaves(args), leaf_names, limit=limit)


def of_program(closed: Any, leaves: Sequence[Any], names: Sequence[str], *, limit: int = 3) -> list[Origin]:
    """The same of a closed jaxpr with these arguments, which have these names."""
    evaluation = _Evaluation()
    args = [evaluation.argument(leaf, name) for leaf, name in zip(leaves, names, strict=True)]
    # JAX's own checks would end the evaluation at the first value, and name a line of this file.
    with jax.debug_nans(False), jax.debug_infs(False):
        results = evaluation.run(closed, args, ())
    return evaluation.first({number for result in results for number in result.origins}, limit)


@dataclass(frozen=True, slots=True)
class _Value:
    array: Any
    kind: Kind | None = None
    """None if all of the array is finite."""
    origins: frozenset[int] = frozenset()
    """Numbers of the origins that a non-finite array comes from; none for a constant."""


class _Evaluation:
    def __init__(self) -> None:
        self.found: list[Origin] = []
        self.sources: list[frozenset[int]] = []
        """Numbers of the origins that each one comes from, and its own."""

    def first(self, numbers: Iterable[int], limit: int) -> list[Origin]:
        """The first nan of some origins with what it comes from, or the first infinities."""
        numbers = sorted(numbers)
        nan = next((number for number in numbers if self.found[number].kind == "nan"), None)
        chosen = numbers[:limit] if nan is None else sorted(self.sources[nan])[-limit:]
        return [self.found[number] for number in chosen]

    def argument(self, array: Any, name: str) -> _Value:
        kind = _kind(array)
        return _Value(array) if kind is None else _Value(array, kind, self._new(kind, name))

    def run(self, jaxpr: Any, args: Sequence[_Value], calls: Site) -> list[_Value]:
        """The results of a jaxpr that equations around call; every value is dropped after its last use."""
        inner = compat.open_jaxpr(jaxpr)
        consts = [_Value(array, _kind(array)) for array in compat.constants(jaxpr)]
        values = dict(zip([*inner.constvars, *inner.invars], [*consts, *args], strict=True))

        def read(atom: Any) -> _Value:
            return _Value(atom.val, _kind(atom.val)) if compat.is_literal(atom) else values[atom]

        kept = {atom for atom in inner.outvars if not compat.is_literal(atom)}
        uses = [{atom for atom in eqn.invars if not compat.is_literal(atom)} for eqn in inner.eqns]
        last = {atom: k for k, atoms in enumerate(uses) for atom in atoms if atom not in kept}
        for k, eqn in enumerate(inner.eqns):
            results = self._results((eqn, *calls), [read(atom) for atom in eqn.invars])
            values |= {
                atom: result for atom, result in zip(eqn.outvars, results, strict=True) if not compat.is_drop(atom)
            }
            for atom in uses[k]:
                if last.get(atom) == k:
                    del values[atom]
        return [read(atom) for atom in inner.outvars]

    def _results(self, site: Site, operands: Sequence[_Value]) -> list[_Value]:
        eqn = site[0]
        body = next((sub for _, _, sub in compat.sub_jaxprs(eqn.params)), None)
        if eqn.primitive.name in _CALLS and body is not None:
            return self.run(body, operands, site)
        arrays = compat.bind(eqn, [operand.array for operand in operands])
        kinds: list[Kind | None] = [_kind(array) for array in arrays]
        made = {kind: self._origins(site, kind, operands) for kind in KINDS if kind in kinds}
        none = frozenset[int]()
        return [_Value(x, kind, none if kind is None else made[kind]) for x, kind in zip(arrays, kinds, strict=True)]

    def _origins(self, site: Site, kind: Kind, operands: Sequence[_Value]) -> frozenset[int]:
        """Where a non-finite result comes from: the equation itself, unless an operand was so before."""
        came = frozenset[int]().union(*(operand.origins for operand in operands))
        # An infinity that comes from an infinity is not an origin; a nan that comes from infinities is.
        if came and (kind == "inf" or any(operand.kind == "nan" and operand.origins for operand in operands)):
            return came
        aval, op = site[0].outvars[0].aval, site[0].primitive.name
        shape = ", ".join(map(str, aval.shape))
        return self._new(kind, f"{aval.dtype}[{shape}] of {op} at {line(site) or 'an unknown line'}", came)

    def _new(self, kind: Kind, value: str, came: frozenset[int] = frozenset()) -> frozenset[int]:
        self.sources.append(came | {len(self.found)})
        self.found.append(Origin(kind=kind, value=value))
        return self.sources[-1]


def _kind(x: Any) -> Kind | None:
    """`nan` if an array has one, else `inf` if it has an infinity."""
    if not jnp.issubdtype(jnp.result_type(x), jnp.inexact) or bool(jnp.isfinite(x).all()):
        return None
    return "nan" if bool(jnp.isnan(x).any()) else "inf"
