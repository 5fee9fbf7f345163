"""A loop of one iteration is what it computes; on every compiler nothing is gathered for its backward pass again."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compilers import COMPILERS, predicted_and_compiled

from sharding import P
from sharding.jit.simplification import simplify

X = np.linspace(-1.0, 1.0, 12, dtype=np.float32).reshape(3, 4)


def carried(x):
    return jax.lax.scan(lambda c, row: (c + row, c * row), x[0], x[:1])


def counted(x):
    return jax.lax.scan(lambda c, _: ((c[0] + 1, c[1]), 2.0), (0, x), None, length=1)


def swapped(x):
    return jax.lax.scan(lambda c, _: ((c[1], c[0]), c[0]), (x, x + 1), None, length=1)


def nested(x):
    return jax.lax.scan(lambda c, row: (carried(c[None] + row)[0], row), x[0], x[None, :1])


def recomputed(x):
    def body(c, w):
        return jnp.tanh(c * w), None

    return jax.grad(lambda w: jax.lax.scan(jax.checkpoint(body), x[0], w)[0].sum())(x[:1])


@pytest.mark.parametrize("f", [carried, counted, swapped, nested, recomputed])
def test_no_loop_is_left(f):
    closed = simplify(jax.make_jaxpr(f)(X))
    assert "scan" not in str(closed)
    found = jax.core.eval_jaxpr(getattr(closed, "jaxpr", closed), closed.consts, X)
    for a, b in zip(found, jax.tree.leaves(f(X)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_what_is_printed_in_a_loop_stays():
    def f(x):
        return jax.lax.scan(lambda c, row: (c, jax.debug.print("{}", row)), 0, x[:1])

    assert "scan" in str(simplify(jax.make_jaxpr(f)(X)))


def gradients(num_layers, w, x):
    def body(x, w):
        return jnp.tanh(x @ w), None

    return jax.grad(lambda w: jax.lax.scan(jax.checkpoint(body), x, w)[0].sum())(w[:num_layers])


@pytest.mark.parametrize(("backend", "described"), COMPILERS.values())
def test_a_single_layer_is_gathered_once(backend, described):
    args = jax.ShapeDtypeStruct((1, 64, 64), "float32"), jax.ShapeDtypeStruct((16, 64), "float32")
    sizes, specs = {"data": 2, "model": 4}, (P(None, "data"), P("model"))
    f = partial(gradients, 1)
    predicted, compiled = predicted_and_compiled(f, args, backend, described, sizes, in_shardings=specs)
    assert predicted == compiled
