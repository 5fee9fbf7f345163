"""Constant folding: what a program computes with known indices and predicates becomes simpler.

`jnp.take(x, 0, axis)` along a dim of size 1 gathers all of `x`, and its transpose scatters all of it into zeros: both
are reshapes. Compilers for accelerators find that out after partitioning, when the collectives are there already.
Indices that count along a batch dim are left out (`batched_indices`). A conditional or a selection with a known
predicate becomes its branch or case, and a `while` that counts a `scan` (`counted_loops`). A remainder of a division by
1 is 0, whatever is divided. Primitives of other packages are calls of their implementations before.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp

from .. import compat
from ..graph import CALLS
from ..graph.straight_line import are_same
from .batched_indices import batched
from .counted_loops import as_scan
from .equations import are_alike, traced, zeros_instead
from .known_indices import Index, Known, constant, of_atom, of_constant, of_result, of_row, of_stack
from .package_primitives import implementation
from .unchanged_carries import carried_as_constants

Indices = tuple[Index | None, ...]
"""What is known of inputs or outputs; None for those of which nothing is."""

GIVEN_OPERANDS = frozenset({"closed_call", "core_call", "eval_jaxpr", "jit", "pjit"})
"""Calls whose body has their operands as inputs."""

OF_OPERANDS = GIVEN_OPERANDS | {"checkpoint", "remat", "remat2"}
"""The same, with those whose results are computed again."""


def fold_constants(jaxpr: Any) -> Any:
    """The jaxpr, which computes the same, with what is known folded; itself if nothing changes."""
    return _Pass().jaxpr(jaxpr, ())[0]


class _Pass:
    def __init__(self) -> None:
        self.done: dict[tuple[int, Indices], tuple[Any, Any, Indices]] = {}
        """Id of a jaxpr and its known inputs -> the jaxpr, which keeps the id valid, its result and known outputs."""

    def jaxpr(self, jaxpr: Any, inputs: Indices) -> tuple[Any, Indices]:
        key = (id(jaxpr), inputs)
        if key not in self.done:
            self.done[key] = (jaxpr, *self.rewritten(jaxpr, inputs))
        return self.done[key][1:]

    def rewritten(self, jaxpr: Any, inputs: Indices) -> tuple[Any, Indices]:
        source = compat.open_jaxpr(jaxpr)
        known = {v: x for v, x in zip(source.invars, inputs, strict=False) if x is not None}
        consts = [(v, of_constant(x)) for v, x in zip(source.constvars, compat.constants(jaxpr), strict=False)]
        known.update((v, index) for v, index in consts if index is not None)
        zeros: set[Any] = set()
        eqns: list[Any] = []
        same: dict[Any, Any] = {}
        """Variable -> the variable or literal that it is equal to."""

        def read(atom: Any) -> Any:
            return atom if compat.is_literal(atom) else same.get(atom, atom)

        for eqn in map(implementation, source.eqns):
            if any(read(v) is not v for v in eqn.invars):
                eqn = eqn.replace(invars=[read(v) for v in eqn.invars])
            if eqn.primitive.name == "rem" and constant(eqn.invars[1], known) == 1:
                if not eqn.outvars[0].aval.shape:
                    known[eqn.outvars[0]], same[eqn.outvars[0]] = 0, compat.new_literal(0, eqn.outvars[0].aval)
                    continue
                eqn = zeros_instead(eqn)
            if (case := _known_case(eqn, known)) is not None:
                same[eqn.outvars[0]] = case
                continue
            if eqn.primitive.name == "cond" and (branch := constant(eqn.invars[0], known)) is not None:
                eqn = branch_call(eqn, min(max(branch, 0), len(eqn.params["branches"]) - 1))
            eqn = _reshaped(self.with_bodies(eqn, known), known, zeros)
            loop, unchanged = carried_as_constants(eqn)
            same.update(unchanged)
            if loop is not eqn:
                eqn = self.with_bodies(loop, known)
            eqn = as_scan(eqn, known)
            same.update(_passed_on(eqn))
            eqns += batched(eqn, known)
            if (index := of_result(eqn, known)) is not None:
                known[eqn.outvars[0]] = index
            if _is_zero_array(eqn):
                zeros.update(eqn.outvars)
        outvars = [*map(read, source.outvars)]
        outputs = tuple(of_atom(v, known) for v in outvars)
        if not same and are_same(eqns, source.eqns):
            return jaxpr, outputs
        return compat.rebuild(jaxpr, eqns=eqns, outvars=outvars), outputs

    def with_bodies(self, eqn: Any, known: dict[Any, Index]) -> Any:
        """An equation with rewritten bodies; adds what is known of its results."""
        name, params = eqn.primitive.name, eqn.params
        if name not in CALLS and name not in ("cond", "scan", "shard_map", "while"):
            return eqn
        for key, position, body in compat.sub_jaxprs(params):
            new, outputs = self.jaxpr(body, _given(eqn, key, known))
            if new is not body:
                params = compat.with_jaxpr(params, key, position, new)
            found = zip(eqn.outvars, _returned(eqn, outputs), strict=False)
            known.update((v, x) for v, x in found if x is not None)
        return eqn if params is eqn.params else eqn.replace(params=params)


def branch_call(eqn: Any, branch: int) -> Any:
    """A call of a branch of a conditional; the conditional itself if it has effects."""
    if eqn.effects:
        return eqn
    taken = compat.jaxpr_fun(eqn.params["branches"][branch])
    with compat.beside(eqn):
        called = jax.make_jaxpr(jax.jit(lambda *operands: taken(*operands)))(*(v.aval for v in eqn.invars[1:]))
    if compat.constants(called):
        return eqn
    (call,) = compat.open_jaxpr(called).eqns
    return compat.new_eqn(eqn, eqn.invars[1:], eqn.outvars, call.primitive, call.params)


def _given(eqn: Any, key: str, known: Known) -> Indices:
    """What is known of the inputs of one of an equation's bodies, the parameter `key`."""
    name, operands = eqn.primitive.name, tuple(of_atom(v, known) for v in eqn.invars)
    if name == "scan":
        consts, carried = compat.scan_parts(eqn.params)
        first = consts + carried
        return (*operands[:consts], *[None] * carried, *map(of_row, operands[first:]))
    if name == "cond":
        return operands[1:]
    if name == "while":
        first = eqn.params["cond_nconsts"]
        return operands[:first] if key == "cond_jaxpr" else operands[first : first + eqn.params["body_nconsts"]]
    return operands if name in OF_OPERANDS else ()


def _returned(eqn: Any, outputs: Indices) -> Indices:
    """What is known of an equation's results."""
    if eqn.primitive.name == "scan":
        _, carried = compat.scan_parts(eqn.params)
        return (*[None] * carried, *map(of_stack, outputs[carried:]))
    return outputs if eqn.primitive.name in OF_OPERANDS else ()


def _known_case(eqn: Any, known: Known) -> Any:
    """The case that a selection with a known predicate returns; else None, as for a scalar index."""
    if eqn.primitive.name != "select_n" or compat.is_drop(eqn.outvars[0]):
        return None
    aval = eqn.outvars[0].aval
    which = constant(eqn.invars[0], known) if aval.shape or jnp.issubdtype(aval.dtype, jnp.inexact) else None
    if which is None:
        return None
    case = eqn.invars[1 + which]
    return case if are_alike(case, eqn.outvars[0]) else None


def _passed_on(eqn: Any) -> dict[Any, Any]:
    """The results of a call that are operands of it, with those."""
    if eqn.primitive.name not in GIVEN_OPERANDS or eqn.effects or not compat.has_free_shardings(eqn):
        return {}
    (_, _, body), *_ = compat.sub_jaxprs(eqn.params)
    jaxpr = compat.open_jaxpr(body)
    operands = dict(zip(jaxpr.invars, eqn.invars, strict=True))
    pairs = [
        (out, v if compat.is_literal(v) else operands.get(v)) for out, v in zip(eqn.outvars, jaxpr.outvars, strict=True)
    ]
    return {out: v for out, v in pairs if v is not None and not compat.is_drop(out) and are_alike(v, out)}


def _reshaped(eqn: Any, known: Known, zeros: Collection[Any]) -> Any:
    """A gather of a whole array, or a scatter of one into zeros, as a reshape; any other equation as it is."""
    name = eqn.primitive.name
    if name not in ("gather", "scatter-add") or constant(eqn.invars[1], known) != 0:
        return eqn
    operand, (result,) = eqn.invars[0], eqn.outvars
    if name == "gather":
        source, is_whole = operand, tuple(eqn.params["slice_sizes"]) == operand.aval.shape
    else:
        source = eqn.invars[2]
        is_whole = not compat.is_literal(operand) and operand in zeros
    shape = result.aval.shape
    if compat.is_literal(source) or not is_whole or math.prod(shape) != math.prod(source.aval.shape):
        return eqn
    if shape == source.aval.shape:
        return eqn
    return traced(eqn, lambda x: jnp.reshape(x, shape), [source], [result])


def _is_zero_array(eqn: Any) -> bool:
    """Whether an equation broadcasts a zero."""
    operand = eqn.invars[0] if eqn.primitive.name == "broadcast_in_dim" else None
    return operand is not None and compat.is_literal(operand) and not operand.aval.shape and not operand.val
