"""`kernel_call`: the op of a function that runs on each device's shards, with its derivatives and `vmap`.

A tangent is a call of the function's JVP, linear in the tangents; its transpose is a call of the function's VJP. Both
take the operands of the function again, so that each is an op with a factor rule of its own.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.interpreters import batching, mlir
from jax.sharding import PartitionSpec

from .. import compat
from ..rules import Kind
from ..rules.notation import Array, Notation
from .implementation import without_bodies


@dataclass(frozen=True, eq=False, kw_only=True)
class KernelCall:
    """What a `kernel_call` computes, at any shapes that fit its rule."""

    name: str
    function: Callable[..., list[Any]]
    """(*operands) -> results."""
    rule: Notation
    """Without `...`, and with the kind of each factor that is no pass-through."""
    jaxprs: dict[Any, jex.ClosedJaxpr] = field(default_factory=dict, repr=False)
    """(shape, dtype) of each operand -> what the function computes."""
    outlines: dict[Any, jex.ClosedJaxpr] = field(default_factory=dict, repr=False)
    """The same, with kernels that do nothing."""

    def jaxpr(self, operands: Sequence[Any]) -> jex.ClosedJaxpr:
        """What the function computes, given shapes and dtypes of the operands, which may be those of manual code."""
        return self._traced(operands, self.jaxprs)

    def outline(self, operands: Sequence[Any]) -> jex.ClosedJaxpr:
        """The same as far as its arrays go: the bodies of kernels, which are slow to trace, may be missing."""
        known = self.jaxprs.get(_key(operands))
        if known is not None:
            return known
        with without_bodies():
            return self._traced(operands, self.outlines)

    def _traced(self, operands: Sequence[Any], known: dict[Any, jex.ClosedJaxpr]) -> jex.ClosedJaxpr:
        key = _key(operands)
        if key not in known:
            shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
            with compat.checks_manual_axes(False):
                known[key] = jax.make_jaxpr(self.function)(*shapes)
        return known[key]

    def results(self, operands: Sequence[Any]) -> list[Any]:
        """Shapes and dtypes of the results, given those of the operands."""
        return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.jaxpr(operands).out_avals]

    def whole(self, operands: Sequence[Any]) -> tuple[jex.ClosedJaxpr, float]:
        """What it computes at the first shapes that it was traced at, and the share of these operands in that.

        A kernel is slow to trace, and shards of its operands have as much work as of its factors.
        """
        if not self.jaxprs:
            return self.jaxpr(operands), 1.0
        first, traced = next(iter(self.jaxprs.items()))
        dims = [
            (names, part / max(size, 1))
            for array, (shape, _), x in zip(self.rule.operands, first, operands, strict=True)
            for names, size, part in zip(array.dims, shape, x.shape, strict=True)
        ]
        shares: dict[str, float] = {}
        for names, share in sorted(dims, key=lambda dim: len(dim[0])):  # single factors determine those in products
            unknown = [n for n in names if n not in shares]
            known = math.prod(shares[n] for n in names if n in shares)
            for k, n in enumerate(unknown):
                shares[n] = 1.0 if k else share / (known or 1.0)
        return traced, math.prod(shares.values())

    def vmapped(self, mapped: Sequence[bool]) -> KernelCall:
        """The call with a leading batch dim, which some operands have and all results."""
        axes = tuple(0 if one else None for one in mapped)
        taken = {n for array in (*self.rule.operands, *self.rule.results) for names in array.dims for n in names}
        batch = (f"batch {len(taken)}",)
        operands = (with_dim(a, batch) if one else a for a, one in zip(self.rule.operands, mapped, strict=True))
        results = (with_dim(a, batch) for a in self.rule.results)
        rule = replace(self.rule, operands=tuple(operands), results=tuple(results))
        return KernelCall(name=self.name, function=jax.vmap(self.function, in_axes=axes), rule=rule)


@dataclass(frozen=True, eq=False, kw_only=True)
class LinearCall(KernelCall):
    """The JVP of a call: (*operands, *tangents of some) -> tangents of the floating-point results."""

    primal: KernelCall
    wrt: tuple[int, ...]
    """The operands that have a tangent."""
    floats: tuple[bool, ...]
    """Which results are of a floating-point dtype."""

    @classmethod
    def of(cls, primal: KernelCall, wrt: Sequence[int], floats: Sequence[bool]) -> LinearCall:
        """The JVP with respect to some operands."""
        own = primal.rule
        operands = (*own.operands, *(own.operands[i] for i in wrt))
        return cls(
            name=f"jvp({primal.name})",
            function=functools.partial(_jvp_of, primal.function, len(own.operands), tuple(wrt)),
            rule=replace(own, operands=operands, results=_where(own.results, floats)),
            primal=primal,
            wrt=tuple(wrt),
            floats=tuple(floats),
        )

    def results(self, operands: Sequence[Any]) -> list[Any]:
        # Not by tracing it: a function with a VJP of its own has no JVP, and needs none to be transposed.
        return list(_where(self.primal.results(operands[: len(self.primal.rule.operands)]), self.floats))

    def transposed(self, wrt: Sequence[int]) -> KernelCall:
        """The VJP: (*operands, *cotangents of the floating-point results) -> cotangents of some operands."""
        own = self.primal.rule
        results = tuple(own.operands[i] for i in wrt)
        names = [{n for dim in array.dims for n in dim} for array in results]
        known = {n for a in (*own.operands, *own.results) for dim in a.dims for n in dim}
        whole = {n: Kind.REPLICATE for n in known if own.kinds.get(n) is Kind.REPLICATE}
        sums = {n: Kind.REDUCE for n in known if not all(n in own for own in names)}
        return KernelCall(
            name=f"vjp({self.primal.name})",
            function=functools.partial(_vjp_of, self.primal.function, len(own.operands), tuple(wrt)),
            rule=replace(
                own,
                operands=(*own.operands, *_where(own.results, self.floats)),
                results=results,
                kinds=sums | whole,
            ),
        )


kernel_call_p = jex.Primitive("kernel_call")
kernel_call_p.multiple_results = True


@kernel_call_p.def_impl
def _impl(*operands: Any, call: KernelCall) -> list[Any]:
    return jax.jit(call.function)(*operands)


@kernel_call_p.def_abstract_eval
def _abstract_eval(*operands: Any, call: KernelCall) -> list[Any]:
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
    return [_result(x, operands) for x in call.results(shapes)]


def _result(x: Any, operands: Sequence[Any]) -> Any:
    """The abstract value of a result, which differs along the manual axes that some operand differs along."""
    differing = [a for a in operands if varying_axes(a)]
    if not differing:
        return ShapedArray(x.shape, x.dtype)
    like = differing[0]
    kind = type(like.mat)(varying=frozenset().union(*map(varying_axes, differing)))
    sharding = like.sharding.update(spec=PartitionSpec(*(None,) * len(x.shape)))
    return like.update(shape=x.shape, dtype=x.dtype, weak_type=False, sharding=sharding, manual_axis_type=kind)


def _lowered(ctx: Any, *operands: Any, call: KernelCall) -> Any:
    avals = [_without_manual_axes(a) for a in ctx.avals_in]
    with compat.checks_manual_axes(False):  # Pallas calls don't say along which manual axes their results vary
        return mlir.lower_fun(call.function, multiple_results=True)(ctx.replace(avals_in=avals), *operands)


def _without_manual_axes(aval: Any) -> Any:
    if not varying_axes(aval):
        return aval
    return aval.update(manual_axis_type=type(aval.mat)(varying=frozenset()))


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: KernelCall) -> Any:
    found = kernel_call_p.bind(*primals, call=call)
    floats = [jnp.issubdtype(x.dtype, jnp.inexact) for x in found]
    wrt = [i for i, t in enumerate(tangents) if not isinstance(t, compat.ad.Zero)]
    linear = LinearCall.of(call, wrt, floats)
    moved = iter(kernel_call_p.bind(*primals, *(tangents[i] for i in wrt), call=linear) if any(floats) else ())
    pairs = zip(found, floats, strict=True)
    return found, [next(moved) if one else compat.ad.Zero(jax.typeof(x).to_tangent_aval()) for x, one in pairs]


def _transpose(cotangents: Sequence[Any], *args: Any, call: KernelCall) -> list[Any]:
    assert isinstance(call, LinearCall), "only a JVP is linear"
    count = len(call.primal.rule.operands)
    operands, tangents = args[:count], args[count:]
    wrt = [i for i, t in zip(call.wrt, tangents, strict=True) if compat.ad.is_undefined_primal(t)]
    given = [compat.ad.instantiate_zeros(ct) for ct in cotangents]
    found = iter(kernel_call_p.bind(*operands, *given, call=call.transposed(wrt)))
    return [*[None] * len(operands), *(next(found) if i in wrt else None for i in call.wrt)]


def _batch(args: Sequence[Any], dims: Sequence[Any], *, call: KernelCall) -> Any:
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    mapped = [d is not None for d in dims]
    args = [jnp.moveaxis(x, d, 0) if one else x for x, d, one in zip(args, dims, mapped, strict=True)]
    if isinstance(call, LinearCall):  # whose operands and tangents have equal shapes
        args = [x if one else jnp.broadcast_to(x, (size, *x.shape)) for x, one in zip(args, mapped, strict=True)]
        primal = call.primal.vmapped([True] * len(call.primal.rule.operands))
        whole = LinearCall.of(primal, call.wrt, call.floats)
        found = kernel_call_p.bind(*args, call=whole)
    else:
        found = kernel_call_p.bind(*args, call=call.vmapped(mapped))
    return found, [0] * len(found)


compat.ad.primitive_jvps[kernel_call_p] = _jvp
compat.ad.primitive_transposes[kernel_call_p] = _transpose
batching.primitive_batchers[kernel_call_p] = _batch
mlir.register_lowering(kernel_call_p, _lowered)


def varying_axes(aval: Any) -> frozenset[Any]:
    """The manual axes that a value differs along."""
    mat = getattr(aval, "mat", None)
    return frozenset() if mat is None else mat.varying


def _key(operands: Sequence[Any]) -> tuple[Any, ...]:
    return tuple((tuple(x.shape), x.dtype) for x in operands)


def with_dim(array: Array, names: tuple[str, ...]) -> Array:
    """The notation of an array with another leading dim."""
    return replace(array, dims=(names, *array.dims))


def _where(items: Sequence[Any], kept: Sequence[bool]) -> tuple[Any, ...]:
    return tuple(itertools.compress(items, kept))


def _with(operands: Sequence[Any], wrt: Sequence[int], values: Sequence[Any]) -> list[Any]:
    changed = dict(zip(wrt, values, strict=True))
    return [changed.get(i, x) for i, x in enumerate(operands)]


def _of_some(function: Callable[..., Any], operands: Sequence[Any], wrt: Sequence[int]) -> Callable[..., list[Any]]:
    """The floating-point results as a function of some operands."""

    def call(*values: Any) -> list[Any]:
        return [x for x in function(*_with(operands, wrt, values)) if jnp.issubdtype(x.dtype, jnp.inexact)]

    return call


def _jvp_of(function: Callable[..., Any], count: int, wrt: tuple[int, ...], *args: Any) -> list[Any]:
    operands, tangents = args[:count], args[count:]
    return jax.jvp(_of_some(function, operands, wrt), tuple(operands[i] for i in wrt), tangents)[1]


def _vjp_of(function: Callable[..., Any], count: int, wrt: tuple[int, ...], *args: Any) -> list[Any]:
    operands, cotangents = args[:count], args[count:]
    _, pullback = jax.vjp(_of_some(function, operands, wrt), *(operands[i] for i in wrt))
    return list(pullback(list(cotangents)))
