"""Arrays of equal elements are computed as scalars, and sent by no one, wherever they are read."""

from functools import reduce

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from support import quick_compile

import sharding
from sharding import P, cost
from sharding.jit.uniform_arrays import as_scalars

X = np.linspace(0.5, 1.5, 64, dtype=np.float32)
S = np.float32(0.75)


def spread(s):
    return jnp.broadcast_to(s, (64,))


def ones(c):
    return jnp.full(64, c)


FORMS = {
    "constants": lambda s: spread(s) * jnp.log(ones(1.0) / 64),
    "a scalar operand": lambda s: 2.0 * spread(s) + 3.0,
    "two scalars": lambda s: spread(s) * spread(s + 1),
    "chain": lambda s: (spread(s) * ones(2.0) + ones(3.0)) / spread(s + 2),
    "selection": lambda s: jnp.where(s > 0, spread(s), ones(2.0)),
    "selected by elements": lambda s: jnp.where(spread(s) > ones(0.5), 1.0, spread(s)),
    "other type": lambda s: jnp.round(10 * spread(s)).astype(jnp.int32).astype(jnp.float32),
    "shapes": lambda s: jnp.flip(jnp.broadcast_to(s, (8, 8)).T.reshape(64) * ones(2.0)),
    "part": lambda s: (jnp.broadcast_to(s, (128,)) + 1)[32:96],
    "call": lambda s: jax.jit(lambda x, c: jnp.exp(x) * c)(spread(s), ones(2.0)),
    "call in a call": lambda s: jax.jit(lambda x: jax.jit(jnp.sin)(x) + 1)(spread(s)),
    "made in a call": lambda s: jax.jit(spread)(s) * ones(2.0),
}
"""Name -> an array of a scalar."""


def in_a_loop(make):
    def f(x, y, s):
        c = jnp.log(ones(2.0)) * spread(s)
        return lax.fori_loop(0, 3, lambda i, xs: both(*xs, make(s * (i + 1)) + c), (x, y))

    return f


def in_a_scan(make):
    def f(x, y, s):
        def body(xs, r):
            return both(*xs, make(r) * spread(s)), None

        return lax.scan(body, (x, y), s * jnp.arange(1.0, 4.0))[0]

    return f


def in_nested_loops(make):
    def f(x, y, s):
        c = make(s)

        def inner(i, xs):
            return both(*xs, c * (i + 1))

        return lax.fori_loop(0, 2, lambda _, xs: lax.fori_loop(0, 2, inner, xs), (x, y))

    return f


def in_a_branch(make):
    def f(x, y, s):
        c = make(s)
        branches = (lambda x, y: both(x, y, c + 1), lambda x, y: (x, y), lambda x, y: both(x, y, make(s) * 2 * s))
        return lax.switch((s * 3).astype(int), branches, x, y)

    return f


def in_a_checkpoint(make):
    return jax.checkpoint(lambda x, y, s: both(x, y, make(s)))


def both(x, y, b):
    return x + b, y * b


AROUND = {
    "program": lambda make: lambda x, y, s: both(x, y, make(s)),
    "loop": in_a_loop,
    "scan": in_a_scan,
    "nested loops": in_nested_loops,
    "branch": in_a_branch,
    "checkpoint": in_a_checkpoint,
}
"""Where the array is read -> a function of two arrays and a scalar, given what makes the array."""


@pytest.mark.parametrize("where", AROUND)
@pytest.mark.parametrize("form", FORMS)
def test_nothing_is_sent(form, where):
    f = AROUND[where](FORMS[form])
    with sharding.mesh(data=2, model=4):
        specs = (P("data"), P("model"))
        step = sharding.jit(f, in_shardings=(*specs, P()), out_shardings=specs)
        assert step.complete(X, X, S).communication().by_kind() == {}
        compiled = step.lower(X, X, S).compile(quick_compile.OPTIONS)
        assert cost.read_compiled(compiled).by_kind() == {}
        for a, b in zip(step(X, X, S), jax.jit(f)(X, X, S), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5)


UNCHANGED = {
    "counting": lambda x, s: x + spread(s) * jnp.arange(64.0),
    "only spread": lambda x, s: x * spread(s) + ones(2.0),
    "named": lambda x, s: x + checkpoint_name(spread(s), "s"),
    "barrier": lambda x, s: x + lax.optimization_barrier(spread(s)),
    "annotated": lambda x, s: x + jnp.exp(sharding.annotate(spread(s), P("data"))),
    "keys": lambda x, s: x + jax.vmap(jax.random.uniform)(jax.random.split(jax.random.key(0), 64)),
}


@pytest.mark.parametrize("name", UNCHANGED)
def test_others_are_left_as_they_are(name):
    with sharding.mesh(data=8):
        jaxpr = jax.make_jaxpr(UNCHANGED[name])(X, S)
    assert as_scalars(jaxpr) is jaxpr


def test_an_op_is_computed_once_for_all_that_read_it():
    def f(x, s):
        b = jnp.exp(spread(s) * 2)
        return x + b, x * (b - 1), x / (b + 1)

    eqns = as_scalars(jax.make_jaxpr(f)(X, S)).jaxpr.eqns
    made = [(eqn.primitive.name, eqn.outvars[0].aval.shape) for eqn in eqns]
    assert [name for name, shape in made if not shape] == ["mul", "exp", "sub", "add"]
    assert sorted(name for name, shape in made if shape) == ["add", *["broadcast_in_dim"] * 3, "div", "mul"]


def test_long_chains_and_deep_calls():
    def chain(x, s):
        return x * reduce(lambda b, k: b * 1.001 if k % 2 else b - 0.001, range(600), spread(s))

    def deep(x, s):
        f = reduce(lambda g, _: jax.jit(lambda y: g(y * 0.99)), range(30), jnp.exp)
        return x * f(spread(s)) + f(x)

    with sharding.mesh(data=8):
        for f in (chain, deep):
            step = sharding.jit(f, in_shardings=(P("data"), P()))
            np.testing.assert_allclose(step(X, S), jax.jit(f)(X, S), rtol=1e-5)
