"""Origins of non-finite values: the first equations of a program with finite operands and a non-finite result."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from .. import compat, paths

_CALLS = ("jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call")
"""Equations to recurse into; a loop or a branch counts as one equation."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """A non-finite value computed from finite ones."""

    kind: str
    """`nan` or `inf`."""
    value: str
    """An argument's path, or dtype, shape, op and source line of a result."""

    def __str__(self) -> str:
        return f"{self.kind} in {self.value}"


def origins(f: Callable[..., Any], *args: Any, names: Sequence[str] = (), limit: int = 3) -> list[Origin]:
    """The first non-finite values of `f(*args)`: arguments, else results of its equations.

    Evaluates the program again, equation by equation on the devices of the arguments, up to the first nan. Infinities
    may be intended, as in masks, so those before the nan are returned with it.

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
    found = list[Origin]()
    for name, leaf in zip(names, leaves, strict=True):
        found += [Origin(kind=kind, value=name) for kind in _not_finite(leaf)]
    if not any(origin.kind == "nan" for origin in found):
        # JAX's own checks would end the evaluation at the first value, and name a line of this file.
        with contextlib.suppress(_Found), jax.debug_nans(False), jax.debug_infs(False):
            _evaluate(closed, compat.constants(closed), leaves, found)
    first = next((i for i, origin in enumerate(found) if origin.kind == "nan"), len(found) - 1)
    return found[max(0, first + 1 - limit) : first + 1]


class _Found(Exception):
    """Stops the evaluation at the first nan."""


def _not_finite(x: Any) -> list[str]:
    """`nan` if an array has one, else `inf` if it has an infinity."""
    if not jnp.issubdtype(jnp.result_type(x), jnp.inexact) or bool(jnp.isfinite(x).all()):
        return []
    return ["nan"] if bool(jnp.isnan(x).any()) else ["inf"]


def _evaluate(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], found: list[Origin]) -> list[Any]:
    """The results of a jaxpr; appends to `found` the equations with finite operands and non-finite results."""
    inner = compat.open_jaxpr(jaxpr)
    values = dict(zip([*inner.constvars, *inner.invars], [*consts, *args], strict=True))

    def read(atom: Any) -> Any:
        return atom.val if compat.is_literal(atom) else values[atom]

    for eqn in inner.eqns:
        operands = [read(atom) for atom in eqn.invars]
        body = next((sub for _, _, sub in compat.sub_jaxprs(eqn.params)), None)
        if eqn.primitive.name in _CALLS and body is not None:
            results = _evaluate(body, compat.constants(body), operands, found)
        else:
            results = compat.bind(eqn, operands)
            _note(eqn, operands, results, found)
        values |= zip(eqn.outvars, results, strict=True)
    return [read(atom) for atom in inner.outvars]


def _note(eqn: Any, operands: Sequence[Any], results: Sequence[Any], found: list[Origin]) -> None:
    after = {kind for x in results for kind in _not_finite(x)}
    if not after:
        return
    before = {kind for x in operands for kind in _not_finite(x)}
    kind = "nan" if "nan" in after else "inf"
    # An infinity that comes from an infinity is not an origin; a nan that comes from infinities is.
    if kind in before or "nan" in before:
        return
    aval = eqn.outvars[0].aval
    where = compat.source_line(eqn) or "an unknown line"
    value = f"{aval.dtype}[{', '.join(map(str, aval.shape))}] of {eqn.primitive.name} at {where}"
    found.append(Origin(kind=kind, value=value))
    if kind == "nan":
        raise _Found
