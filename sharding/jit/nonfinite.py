"""Origins of non-finite values: the equations that made the infinities and nans which reach a program's results."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from .. import compat, paths
from ..graph.graph import Site, line

_CALLS = ("jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call")
"""Equations to recurse into, beside branches. A loop is evaluated as one equation, and again if it is an origin."""

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
        self.iteration = ""
        """Which iteration of a loop is evaluated."""

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
        if eqn.primitive.name == "cond":
            return self.run(eqn.params["branches"][int(operands[0].array)], operands[1:], site)
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
        if site[0].primitive.name in ("scan", "while") and (inside := self._in_loop(site, kind, operands)):
            return came | inside
        aval, op = site[0].outvars[0].aval, site[0].primitive.name
        shape, where = ", ".join(map(str, aval.shape)), line(site) or "an unknown line"
        return self._new(kind, f"{aval.dtype}[{shape}] of {op} at {where}{self.iteration}", came)

    def _in_loop(self, site: Site, kind: Kind, operands: Sequence[_Value]) -> frozenset[int]:
        """The origins inside a loop, of the first iteration that makes such a value; none if there is no such one."""
        body, num_carried, iterations = _loop(site[0], operands)
        run, around = jax.jit(compat.jaxpr_fun(body)), self.iteration
        carried = None
        for number, arguments in enumerate(iterations):
            args = arguments(carried)
            if args is None:
                break
            if all(value.kind is None for value in args):  # the first iterations are, mostly: not equation by equation
                arrays = run(*(value.array for value in args))
                if all(_kind(array) is None for array in arrays):
                    carried = [_Value(array) for array in arrays[:num_carried]]
                    continue
            self.iteration = f", iteration {number} of the {site[0].primitive.name}{around}"
            results = self.run(body, args, site)
            self.iteration = around
            found = [value.origins for value in results if value.kind == kind]
            if found:
                return frozenset[int]().union(*found)
            carried = results[:num_carried]
        return frozenset()

    def _new(self, kind: Kind, value: str, came: frozenset[int] = frozenset()) -> frozenset[int]:
        self.sources.append(came | {len(self.found)})
        self.found.append(Origin(kind=kind, value=value))
        return self.sources[-1]


_Arguments = Callable[[Sequence[_Value] | None], Sequence[_Value] | None]
"""What an iteration carries, None for the first -> the arguments of its body; None where the loop ends."""


def _loop(eqn: Any, operands: Sequence[_Value]) -> tuple[Any, int, Iterator[_Arguments]]:
    """The body of a loop, how many values it carries, and its iterations."""
    if eqn.primitive.name == "scan":
        num_consts, num_carried = compat.scan_parts(eqn.params)
        consts, start = operands[:num_consts], operands[num_consts : num_consts + num_carried]
        xs = operands[num_consts + num_carried :]

        def of(k: int) -> _Arguments:
            parts = [_Value(x.array[k], x.kind and _kind(x.array[k]), x.origins) for x in xs]
            return lambda carried: [*consts, *(start if carried is None else carried), *parts]

        order = range(eqn.params["length"])
        return eqn.params["jaxpr"], num_carried, map(of, reversed(order) if eqn.params["reverse"] else order)
    of_test, of_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    test, consts = jax.jit(compat.jaxpr_fun(eqn.params["cond_jaxpr"])), operands[of_test : of_test + of_body]
    start = operands[of_test + of_body :]

    def arguments(carried: Sequence[_Value] | None) -> Sequence[_Value] | None:
        values = start if carried is None else carried
        (goes_on,) = test(*(value.array for value in (*operands[:of_test], *values)))
        return [*consts, *values] if goes_on else None

    return eqn.params["body_jaxpr"], len(start), itertools.repeat(arguments)


def _kind(x: Any) -> Kind | None:
    """`nan` if an array has one, else `inf` if it has an infinity."""
    if not jnp.issubdtype(jnp.result_type(x), jnp.inexact) or bool(jnp.isfinite(x).all()):
        return None
    return "nan" if bool(jnp.isnan(x).any()) else "inf"
