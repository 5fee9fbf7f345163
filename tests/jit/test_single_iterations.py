"""A loop of one iteration is what it computes, and one that is unrolled whole.

On every compiler nothing is gathered for the backward pass again.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compilers import COMPILERS, predicted_and_compiled

from sharding import P
from sharding.jit import single_iterations
from sharding.jit.simplification import simplify

X = np.linspace(-1.0, 1.0, 12, dtype=np.float32).reshape(3, 4)
W = np.ones((3, 4, 4), np.float32)


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


def cumulated(x):
    """Both a carry and a stack, from the last row to the first."""
    return jax.lax.scan(lambda c, row: (c + row, c * row), x[0], x, reverse=True, unroll=True)


def constant(x):
    """Rows that are literals, and a carry that is one from the first iteration on."""
    return jax.lax.scan(lambda c, row: (jnp.float32(1), (2.0, c + row)), x[0, 0], x[:, 0], unroll=8)


def nested_unrolled(x):
    return jax.lax.scan(lambda c, row: (cumulated(x + row[None])[0] + c, row), x[0], x, unroll=3)


def through_its_stack(x):
    return jax.grad(lambda x: jax.lax.scan(lambda c, w: (jnp.tanh(c * w), c), x[0], x, unroll=True)[0].sum())(x)


FLAT = [carried, counted, swapped, nested, recomputed, cumulated, constant, nested_unrolled, through_its_stack]


@pytest.mark.parametrize("f", FLAT)
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


def test_a_loop_that_is_unrolled_in_part_stays():
    assert "scan" in str(simplify(jax.make_jaxpr(partial(gradients, 3, unroll=2))(W, X)))


def test_a_large_loop_stays(monkeypatch):
    monkeypatch.setattr(single_iterations, "MOST_EQUATIONS", 8)
    assert "scan" in str(simplify(jax.make_jaxpr(cumulated)(np.ones((6, 4)))))


def test_a_loop_that_only_carries_values_stays():
    """Its iterations are sharded alike; what each makes of one array could be sharded in another way."""
    f = partial(jax.lax.fori_loop, 0, 3, lambda _, x: jnp.sin(x @ x.T @ x), unroll=True)
    assert "scan" in str(simplify(jax.make_jaxpr(f)(X)))


def layer(x, w):
    return jnp.tanh(x @ w), None


RECOMPUTED = jax.checkpoint(layer)


def gradients(num_layers, w, x, body=RECOMPUTED, unroll=1):
    return jax.grad(lambda w: jax.lax.scan(body, x, w, unroll=unroll)[0].sum())(w[:num_layers])


@pytest.mark.parametrize(("backend", "described"), COMPILERS.values())
def test_a_single_layer_is_gathered_once(backend, described):
    args = jax.ShapeDtypeStruct((1, 64, 64), "float32"), jax.ShapeDtypeStruct((16, 64), "float32")
    sizes, specs = {"data": 2, "model": 4}, (P(None, "data"), P("model"))
    f = partial(gradients, 1)
    predicted, compiled = predicted_and_compiled(f, args, backend, described, sizes, in_shardings=specs)
    assert predicted == compiled


@pytest.mark.parametrize(("backend", "described"), COMPILERS.values())
@pytest.mark.parametrize("num_layers", [2, 5])
def test_unrolled_layers_are_gathered_once(num_layers, backend, described):
    """The backward pass reads the weights that the loop has stacked: those that the forward pass has gathered."""
    args = jax.ShapeDtypeStruct((8, 64, 64), "float32"), jax.ShapeDtypeStruct((512, 64), "float32")
    sizes, specs = {"data": 2, "model": 4}, (P(None, "data"), P("data"))
    f = partial(gradients, num_layers, body=layer, unroll=True)
    predicted, compiled = predicted_and_compiled(f, args, backend, described, sizes, in_shardings=specs)
    assert predicted == compiled
    assert predicted["all-gather"][0] == num_layers
