"""Where the values of a program stop being finite: the first ones that are not, though all they were made of is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from . import compat, paths

_CALLS = ("jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call")
"""Equations that are looked into; of a loop or a branch the whole is one equation."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """A value that is not finite while all that it was made of is."""

    what: str
    """`nan` or `inf`."""
    value: str
    """The path of an argument, or dtype, shape, op and source line."""

    def __str__(self) -> str:
        return f"{self.what} in {self.value}"


def origins(f: Callable[..., Any], *args: Any, names: Sequence[str] = (), limit: int = 3) -> list[Origin]:
    """The first values of `f(*args)` that are not finite: arguments by their paths, else what the program makes.

    The program is computed once more, equation by equation on the devices where the arguments lie, until a nan is
    found. What masks with infinities counts too, so the infinities that were made before it come with it.

    Args:
        f: a function of pytrees of arrays, traceable.
        *args: for it.
        names: of the arguments, for their paths; `args/0` and so on where it is silent.
        limit: at most so many.
    """
    prefixes = [*names, *(f"args/{i}" for i in range(len(names), len(args)))]
    leaf_names = [name for prefix, arg in zip(prefixes, args, strict=True) for name in paths.of_tree(arg, prefix)]
    leaves, found = jax.tree.leaves(args), list[Origin]()
    for name, leaf in zip(leaf_names, leaves, strict=True):
        found += [Origin(what=what, value=name) for what in _not_finite(leaf)]
    closed = jax.make_jaxpr(f)(*args)
    if not any(origin.what == "nan" for origin in found):
        with contextlib.suppress(_Found):
            _evaluate(closed, compat.constants(closed), leaves, found)
    first = next((i for i, origin in enumerate(found) if origin.what == "nan"), len(found) - 1)
    return found[max(0, first + 1 - limit) : first + 1]


class _Found(Exception):
    """A nan was found."""


def _not_finite(x: Any) -> list[str]:
    """`nan` if an array has one, `inf` if it has an infinity and no nan."""
    if not jnp.issubdtype(jnp.result_type(x), jnp.inexact) or bool(jnp.isfinite(x).all()):
        return []
    return ["nan"] if bool(jnp.isnan(x).any()) else ["inf"]


def _evaluate(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], found: list[Origin]) -> list[Any]:
    """The results of a jaxpr; notes the equations that make what is not finite of what is."""
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
    after = {what for x in results for what in _not_finite(x)}
    if not after:
        return
    before = {what for x in operands for what in _not_finite(x)}
    what = "nan" if "nan" in after else "inf"
    # An infinity of an infinity is no news; a nan of infinities is.
    if what in before or "nan" in before:
        return
    aval = eqn.outvars[0].aval
    where = compat.source_line(eqn) or "no known line"
    value = f"{aval.dtype}[{', '.join(map(str, aval.shape))}] of {eqn.primitive.name} at {where}"
    found.append(Origin(what=what, value=value))
    if what == "nan":
        raise _Found
