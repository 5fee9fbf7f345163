"""What every iteration would compute again runs once before the loop; the rest, and all values, stay."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support import quick_compile

import sharding
from sharding import P, cost
from sharding.jit.simplification import simplify

W = np.linspace(-1.0, 1.0, 64, dtype=np.float32).reshape(8, 8)
X = np.linspace(0.0, 1.0, 32, dtype=np.float32).reshape(4, 8)


def in_a_scan(w, x):
    return lax.scan(lambda c, _: (jnp.tanh(c * jnp.sum(w, 0, keepdims=True)), None), x, None, length=3)[0]


def in_a_fori_loop(w, x):
    return lax.fori_loop(0, 3, lambda i, c: jnp.tanh(c @ (w @ w.T) + i), x)


def in_a_while(w, x):
    return lax.while_loop(lambda c: jnp.sum(c) < 99.0, lambda c: c + jnp.max(w), x)


def in_nested_loops(w, x):
    def outer(c, row):
        return lax.fori_loop(0, 2, lambda _, d: d * jnp.sum(w) + jnp.sum(row), c), row.sum()

    return lax.scan(outer, x, x)


def in_a_call(w, x):
    scale = jax.jit(lambda v: 1.0 / (1.0 + jnp.abs(v).sum()))
    return lax.scan(lambda c, row: (c * scale(w), c @ row), x, x)


def with_several_results(w, x):
    def body(c, _):
        values, places = lax.top_k(w, 2)
        return c + values.sum() * places[0, 0], values

    return lax.scan(body, x, None, length=2)


def rounded_weights(w, x):
    def body(c, _):
        return jnp.tanh(c.astype("bfloat16") @ w.astype("bfloat16")).astype(c.dtype), None

    return lax.scan(body, x, None, length=3)[0]


def rounded_weights_of_nested_loops(w, x):
    return lax.fori_loop(0, 2, lambda _, c: rounded_weights(w, c), x)


def in_a_call_on_what_varies(w, x):
    layer = jax.jit(lambda c, w: jnp.tanh(c * jnp.sum(w, 0, keepdims=True)))
    return lax.scan(lambda c, _: (layer(c, w), None), x, None, length=3)[0]


def in_a_call_that_returns_what_varies(w, x):
    layer = jax.jit(lambda c, w: (jnp.maximum(c, c), jnp.tanh(c * jnp.sum(w, 0, keepdims=True))))

    def body(c, _):
        same, new = layer(c, w)
        return new + same, same

    return lax.scan(body, x, None, length=3)


MOVED = {
    in_a_call_on_what_varies: set(),
    in_a_call: {"dot_general"},
    in_a_fori_loop: {"dot_general"},
    in_a_scan: set(),
    in_a_while: set(),
    in_nested_loops: {"reduce_sum"},
    with_several_results: set(),
}
"""Program -> the primitives that do work on what varies."""

ROUNDED = [rounded_weights, rounded_weights_of_nested_loops]


def larger_than_its_operands(w, x):
    return lax.scan(lambda c, _: (c + (w[:, :1] * w[:1])[:4], None), x, None, length=3)[0]


def elementwise(w, x):
    return lax.scan(lambda c, _: (jnp.tanh(c + jnp.exp(w)[:4]), None), x, None, length=3)[0]


def behind_a_barrier(w, x):
    return lax.scan(lambda c, _: (c + jnp.sum(lax.optimization_barrier(w)), None), x, None, length=3)[0]


def recomputed(w, x):
    return lax.scan(lambda c, _: (jax.checkpoint(lambda d: d + jnp.sum(w))(c), None), x, None, length=3)[0]


def varying(w, x):
    return lax.scan(lambda c, _: (c @ w, jnp.sum(c)), x, None, length=3)


STAYING = [behind_a_barrier, elementwise, larger_than_its_operands, recomputed, varying]


def work_in_loop(f):
    """The primitives that do work in the first loop of a simplified program."""
    jaxpr = simplify(jax.make_jaxpr(f)(W, X))
    loop = next(e for e in getattr(jaxpr, "jaxpr", jaxpr).eqns if e.primitive.name in ("scan", "while"))
    body = str(loop.params["jaxpr" if loop.primitive.name == "scan" else "body_jaxpr"])
    return {name for name in ("dot_general", "reduce_max", "reduce_sum", "top_k") if name in body}


@pytest.mark.parametrize("f", [*MOVED, *STAYING, *ROUNDED, in_a_call_that_returns_what_varies])
def test_values_are_the_same(f):
    closed = jax.make_jaxpr(f)(W, X)
    simple = simplify(closed)
    found = jax.core.eval_jaxpr(getattr(simple, "jaxpr", simple), simple.consts, W, X)
    for a, b in zip(found, jax.tree.leaves(f(W, X)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)  # a product is fused differently in a loop and before it


@pytest.mark.parametrize("f", MOVED)
def test_work_is_moved(f):
    assert work_in_loop(f) == MOVED[f]


@pytest.mark.parametrize("f", ROUNDED)
def test_weights_are_rounded_before_the_loop(f):
    jaxpr = simplify(jax.make_jaxpr(f)(W, X))
    eqns = getattr(jaxpr, "jaxpr", jaxpr).eqns
    assert [e.primitive.name for e in eqns] == ["convert_element_type", "scan"]


@pytest.mark.parametrize("f", STAYING)
def test_the_rest_stays(f):
    closed = jax.make_jaxpr(f)(W, X)
    assert simplify(closed) is closed


def test_derivatives_are_the_same():
    with sharding.mesh(data=8):
        step = sharding.jit(jax.grad(lambda w, x: in_a_fori_loop(w, x).sum()), in_shardings=(P("data"), P()))
        found = step(W, X)
    np.testing.assert_allclose(found, jax.grad(lambda w, x: in_a_fori_loop(w, x).sum())(W, X), rtol=1e-5, atol=1e-6)


def test_a_sum_of_an_invariant_is_reduced_once():
    with sharding.mesh(data=8):
        step = sharding.jit(in_a_scan, in_shardings=(P("data"), P()))
        (collective,) = step.complete(W, X).communication()
        compiled = cost.read_compiled(step.lower(W, X).compile(quick_compile.OPTIONS))
    assert (collective.kind, collective.count) == ("all-reduce", 1)
    assert compiled.by_kind() == {"all-reduce": (1, 32)}
