"""Simplification of a traced program, before its shardings are inferred.

Equal equations become one, also inside of calls if they reduce something. XLA merges equal instructions too, but never
equal collectives, since each has a channel of its own: a gradient norm that is computed once to clip and once to report
is computed, and reduced, once. A `psum` over dims, which is what `vmap` makes of one over its axis, becomes the
reduction that it is. A product of two flattened arrays (`vdot`) contracts their own dims: a flattened array cannot keep
the sharding of its minor dims. A vmapped `while` is written as JAX lowers it: it runs while the condition of any
example holds, and the others keep their values. A selection between a value and itself is that value, integers minus
themselves are zeros, an array of which a pad cuts off all elements is padding, a product without elements is made of
nothing, and what is reduced over no dims is left. A reshape in another order of dims becomes a transposition and a
reshape, a platform-dependent conditional its platform's branch, a loop of one iteration or one that is unrolled what it
computes, a row of a stack what was stacked, an array that is overwritten whole what is written, a transposed product
the product in the other order, a slice of a product the product of slices, and a reduction of arrays side by side those
of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from .. import compat
from ..graph import CALLS
from ..graph.straight_line import are_same
from .constant_folding import GIVEN_OPERANDS, branch_call, fold_constants
from .equal_values import ValueNumbers
from .equations import are_alike, traced, without_unused, zeros_instead
from .known_indices import OF_EQUALS
from .loop_invariants import hoist
from .own_zeros import with_own_zeros
from .reduced_parts import reduced_apart
from .shared_sums import SharedSums
from .single_iterations import same_as_p, unrolled
from .sliced_products import sliced_first
from .stacked_rows import StackedRows
from .sunk_broadcasts import sink_broadcasts
from .transposed_products import turned
from .uniform_arrays import as_scalars

REDUCTIONS = {"pmax": jax.lax.reduce_max, "pmin": jax.lax.reduce_min, "psum": jax.lax.reduce_sum}
"""Collective -> the same over dims."""

IDEMPOTENT = frozenset({"and", "max", "min", "or", "select_n"})
"""Primitives that return what two equal operands are."""

SIMPLIFIED_INSIDE = CALLS | {"cond", "scan", "shard_map", "while"}
"""Primitives whose bodies are simplified, too."""


def simplify(jaxpr: Any, platform: str = "cpu") -> Any:
    """The simplified jaxpr, which computes the same on a platform; itself if nothing changes."""
    return _Simplifier(platform).jaxpr(sink_broadcasts(as_scalars(fold_constants(jaxpr))))


class _Simplifier:
    def __init__(self, platform: str) -> None:
        self.platform = platform
        self.values = ValueNumbers()
        self.shared_sums = SharedSums(self.values)
        self.done: dict[tuple[int, tuple[int, ...]], tuple[Any, Any]] = {}
        """Id of a jaxpr and its equal inputs -> the jaxpr, which keeps the id valid, and its result."""

    def jaxpr(self, jaxpr: Any, equal: tuple[int, ...] = ()) -> Any:
        """The simplified jaxpr.

        Args:
            jaxpr: the jaxpr.
            equal: for each input the first one that is always equal; none are if empty.
        """
        key = (id(jaxpr), equal)
        if key not in self.done:
            self.done[key] = (jaxpr, self.simplified(jaxpr, equal))
        return self.done[key][1]

    def simplified(self, jaxpr: Any, equal: tuple[int, ...]) -> Any:
        source = compat.open_jaxpr(jaxpr)
        same: dict[Any, Any] = {source.invars[i]: source.invars[k] for i, k in enumerate(equal) if i != k}
        eqns: list[Any] = []
        flattened: dict[Any, Any] = {}
        stacks = StackedRows()
        numbers: dict[Any, int] = {}
        computed = {self.values.of_atom(v): v for v in reversed(source.invars)}
        """Number -> the value that has it."""

        def number(atom: Any) -> int:
            return self.values.of_operand(atom, numbers)

        def read(atom: Any) -> Any:
            return atom if compat.is_literal(atom) else same.get(atom, atom)

        given = [
            new
            for whole in self.shared_sums.inlined(source.eqns)
            for eqn in unrolled(whole)
            for one in _as_reductions(_with_one_condition(_branch_of_platform(eqn, self.platform)))
            for simpler in _transposed_first(one)
            for new in hoist(self.with_simple_bodies(simpler))
        ]
        is_changed = any(v in same for eqn in given for v in eqn.invars if not compat.is_literal(v))
        is_changed = is_changed or not are_same(given, source.eqns)
        for eqn in given:
            if any(read(v) is not v for v in eqn.invars):
                eqn, is_changed = eqn.replace(invars=[read(v) for v in eqn.invars]), True
            if (loop := with_own_zeros(eqn)) is not eqn:
                eqn, is_changed = loop, True
            if (product := _unflattened(eqn, flattened)) is not eqn:
                eqn, is_changed = product, True
            if eqn.primitive.name == "reshape" and len(eqn.outvars[0].aval.shape) == 1 and len(eqn.invars) == 1:
                flattened[eqn.outvars[0]] = eqn.invars[0]
            if _is_scalar_as_array(eqn):
                as_array = partial(jax.lax.reshape, new_sizes=eqn.outvars[0].aval.shape)
                eqn, is_changed = traced(eqn, as_array, eqn.invars, eqn.outvars), True
            if (value := _of_equals(eqn)) is not None:
                like = partial(jnp.full_like, eqn.invars[0].aval, value, dtype=eqn.outvars[0].aval.dtype)
                eqn, is_changed = traced(eqn, like, [], eqn.outvars), True
            if _is_empty_product(eqn):
                eqn, is_changed = zeros_instead(eqn), True
            if _is_only_padding(eqn):
                fill = partial(jax.lax.broadcast, sizes=eqn.outvars[0].aval.shape)
                eqn, is_changed = traced(eqn, fill, eqn.invars[1:], eqn.outvars), True
            if (row := stacks.simpler(eqn)) is not eqn:
                eqn, is_changed = row, True
            stacks.add(eqn)
            if (operand := stacks.passed_on(eqn) or _passed_on(eqn)) is not None:
                same[eqn.outvars[0]], numbers[eqn.outvars[0]], is_changed = operand, number(operand), True
                continue
            results = self.values.of_results(eqn, [*map(number, eqn.invars)])
            new = [(v, n) for v, n in zip(eqn.outvars, results, strict=True) if not compat.is_drop(v)]
            equals = {v: computed[n] for v, n in new if n in computed}
            numbers.update(new)
            same.update(equals)
            is_changed = is_changed or bool(equals)
            if len(equals) < len(new) or not new:
                computed.update((n, v) for v, n in reversed(new) if v not in equals)
                eqns.append(eqn)
        outvars = [*map(read, source.outvars)]
        given, eqns = eqns, reduced_apart(sliced_first(turned(eqns, outvars), outvars), outvars)
        if not is_changed and are_same(given, eqns):
            return jaxpr
        live = without_unused(eqns, outvars, flattened.keys() | stacks.makers.keys())
        return compat.rebuild(jaxpr, eqns=live, outvars=outvars)

    def with_simple_bodies(self, eqn: Any) -> Any:
        """An equation with simplified bodies; itself if none changes."""
        params, name = eqn.params, eqn.primitive.name
        equal = _equal(eqn.invars) if name in GIVEN_OPERANDS else ()
        for key, position, body in compat.sub_jaxprs(params) if name in SIMPLIFIED_INSIDE else ():
            new = self.jaxpr(body, equal)
            if new is not body:
                params = compat.with_jaxpr(params, key, position, new)
        return eqn if params is eqn.params else eqn.replace(params=params)


def _equal(atoms: Sequence[Any]) -> tuple[int, ...]:
    """For each atom the index of the first one that is the same variable; empty if all differ."""
    first: dict[Any, int] = {}
    found = tuple(i if compat.is_literal(v) else first.setdefault(v, i) for i, v in enumerate(atoms))
    return found if len(first) < sum(not compat.is_literal(v) for v in atoms) else ()


def _branch_of_platform(eqn: Any, platform: str) -> Any:
    """A call of the branch that a platform-dependent conditional takes; any other equation as it is."""
    platforms = eqn.params.get("branches_platforms") if eqn.primitive.name == "cond" else None
    if not platforms:
        return eqn
    fitting = [k for k, names in enumerate(platforms) if names is None or platform in names]
    return branch_call(eqn, fitting[0]) if fitting else eqn


def _as_reductions(eqn: Any) -> list[Any]:
    """A collective over dims as reductions; any other equation as it is."""
    axes = eqn.params.get("axes", ()) if eqn.primitive.name in REDUCTIONS else ()
    if not axes or not all(isinstance(axis, int) for axis in axes) or eqn.params.get("axis_index_groups"):
        return [eqn]
    reduce = REDUCTIONS[eqn.primitive.name]
    pairs = zip(eqn.invars, eqn.outvars, strict=True)
    return [traced(eqn, lambda x: reduce(x, axes), [operand], [result]) for operand, result in pairs]


def _with_one_condition(eqn: Any) -> Any:
    """A vmapped `while` as one with a scalar condition; any other equation as it is."""
    if eqn.primitive.name != "while" or eqn.effects:
        return eqn
    p, avals = eqn.params, [v.aval for v in eqn.invars]
    n_cond, n_body = p["cond_nconsts"], p["body_nconsts"]
    n_consts = n_cond + n_body
    conditions, body = compat.jaxpr_fun(p["cond_jaxpr"]), compat.jaxpr_fun(p["body_jaxpr"])
    batch = p["cond_jaxpr"].out_avals[0].shape
    if not batch or any(aval.sharding.mesh.manual_axes for aval in avals):
        return eqn

    def any_holds(*args: jax.Array) -> jax.Array:
        return jax.lax.reduce_or(conditions(*args)[0], range(len(batch)))

    def advance_those(*args: jax.Array) -> list[jax.Array]:
        carry = args[n_consts:]
        (hold,) = conditions(*args[:n_cond], *carry)
        return [
            jax.lax.select_n(jax.lax.broadcast_in_dim(hold, old.shape, range(len(batch))), old, new)
            for old, new in zip(carry, body(*args[n_cond:]), strict=True)
        ]

    with compat.beside(eqn):
        condition = jax.make_jaxpr(any_holds)(*avals[:n_cond], *avals[n_consts:])
        advance = jax.make_jaxpr(advance_those)(*avals)
    params = {**p, "cond_jaxpr": condition, "body_jaxpr": advance, "body_nconsts": n_consts}
    return eqn.replace(invars=[*eqn.invars[:n_cond], *eqn.invars], params=params)


def _unflattened(eqn: Any, flattened: Mapping[Any, Any]) -> Any:
    """The product of two flattened arrays as one that contracts all dims; any other equation as it is."""
    if eqn.primitive.name != "dot_general" or eqn.params["dimension_numbers"] != (((0,), (0,)), ((), ())):
        return eqn
    sources = [flattened[v] for v in eqn.invars if not compat.is_literal(v) and v in flattened]
    if len(sources) < 2 or any(map(compat.is_literal, sources)) or sources[0].aval.shape != sources[1].aval.shape:
        return eqn
    dims = tuple(range(len(sources[0].aval.shape)))
    return eqn.replace(invars=sources, params={**eqn.params, "dimension_numbers": ((dims, dims), ((), ()))})


def _transposed_first(eqn: Any) -> list[Any]:
    """A reshape in another order of dims as a transposition and a reshape; any other equation as it is."""
    if eqn.primitive.name != "reshape" or eqn.params.get("dimensions") is None or len(eqn.invars) > 1:
        return [eqn]
    transpose = traced(eqn, partial(jax.lax.transpose, permutation=eqn.params["dimensions"]), eqn.invars)
    return [transpose, eqn.replace(invars=transpose.outvars, params=eqn.params | {"dimensions": None})]


def _is_scalar_as_array(eqn: Any) -> bool:
    """Whether an equation makes an array of one element of a scalar, such as the gradient of a bias of one feature.

    Not in the body of a `shard_map`, where nothing is inferred.
    """
    if eqn.primitive.name != "broadcast_in_dim" or compat.is_literal(eqn.invars[0]) or eqn.invars[0].aval.shape:
        return False
    aval = eqn.outvars[0].aval
    return aval.size == 1 and aval.ndim > 0 and not aval.sharding.mesh.manual_axes


def _of_equals(eqn: Any) -> int | None:
    """What an equation makes of each element, if it subtracts or compares an array of integers and itself."""
    if eqn.primitive.name not in OF_EQUALS or eqn.invars[0] is not eqn.invars[1]:
        return None
    aval = eqn.invars[0].aval
    return OF_EQUALS[eqn.primitive.name] if aval.shape and jnp.issubdtype(aval.dtype, jnp.integer) else None


def _is_empty_product(eqn: Any) -> bool:
    """Whether an equation multiplies to an array without elements; not in the body of a `shard_map`."""
    if eqn.primitive.name != "dot_general":
        return False
    aval = eqn.outvars[0].aval
    return aval.size == 0 and not aval.sharding.mesh.manual_axes


def _is_only_padding(eqn: Any) -> bool:
    """Whether an equation cuts off all of what it pads."""
    if eqn.primitive.name != "pad":
        return False
    pairs = zip(eqn.invars[0].aval.shape, eqn.params["padding_config"], strict=True)
    return any(min(low, 0) + min(high, 0) + n + max(n - 1, 0) * gap <= 0 for n, (low, high, gap) in pairs)


def _passed_on(eqn: Any) -> Any:
    """The operand that an equation returns as it is, such as one of two equal operands or cases; else None."""
    if eqn.primitive is same_as_p or _turns_nothing(eqn) or _reduces_nothing(eqn):
        return eqn.invars[0]
    if _is_overwritten(eqn):
        return eqn.invars[1]
    operands = eqn.invars[1:] if eqn.primitive.name == "select_n" else eqn.invars
    is_same = eqn.primitive.name in IDEMPOTENT and len(operands) > 1 and all(v is operands[0] for v in operands)
    if not is_same or compat.is_literal(operands[0]) or compat.is_drop(eqn.outvars[0]):
        return None
    given, returned = operands[0].aval, eqn.outvars[0].aval
    return operands[0] if getattr(given, "weak_type", False) == getattr(returned, "weak_type", False) else None


def _is_overwritten(eqn: Any) -> bool:
    """Whether an equation updates all of an array."""
    if eqn.primitive.name != "dynamic_update_slice" or compat.is_literal(eqn.invars[1]):
        return False
    return are_alike(eqn.invars[1], eqn.outvars[0])


def _reduces_nothing(eqn: Any) -> bool:
    """Whether an equation reduces over no dims, as a sum of a number does."""
    is_reduction = eqn.primitive.name.startswith("reduce_") and eqn.params.get("axes") == () and len(eqn.invars) == 1
    return is_reduction and are_alike(eqn.invars[0], eqn.outvars[0])


def _turns_nothing(eqn: Any) -> bool:
    """Whether an equation turns dims of size 1, as the gradient of a convolution with 1 x 1 kernels does."""
    is_turn = eqn.primitive.name == "rev" and not compat.is_literal(eqn.invars[0])
    return is_turn and all(eqn.invars[0].aval.shape[d] == 1 for d in eqn.params["dimensions"])
