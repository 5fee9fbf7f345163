"""What XLA:TPU stores in 16 bits beside sums that its kernels compute, and small products that are never stored."""

import jax
import jax.numpy as jnp
import pytest
from support import compilers
from support.peak_memory import check_compiled_temporaries, check_temporaries, floats

ROWS, SIZE, WIDE, FEW = 16384, 1024, 4096, 10
X, W, V, H = floats(ROWS, SIZE), floats(SIZE, WIDE), floats(WIDE, SIZE), floats(ROWS, WIDE)
G, U = floats(ROWS, FEW), floats(FEW, WIDE)
WHOLE = 2 * ROWS * WIDE
"""Bytes of a product's result in 16 bits."""


def with_product(other):
    """Another function of a product beside a second product."""
    return lambda x, w, v, *more: (lambda y: (other(y, *more), y @ v))(x @ w)


def weight_and_bias(x, h, g, u):
    """Gradients of a layer, from one of the layer after it."""
    d = (g @ u) * (1 - h * h)
    return x.T @ d, d.sum(0)


def all_gradients(x, h, g, u, v):
    d = (g @ u) * (1 - h * h)
    return x.T @ d, d.sum(0), d @ v


SUMMED = {
    "a sum over rows": (with_product(lambda y: y.sum(0)), (X, W, V), 1),
    "a maximum of rows": (with_product(lambda y: y.max(1)), (X, W, V), 1),
    "a sum of squares": (with_product(lambda y: jnp.square(y).sum()), (X, W, V), 1),
    "a sum of a product with another array": (with_product(lambda y, h: (y * h).sum(0)), (X, W, V, H), 1),
    "two sums": (with_product(lambda y, h: ((y * h).sum(1), y.sum(0))), (X, W, V, H), 1),
    "rows minus their mean": (lambda x, w, v: (lambda y: (y - y.mean(1, keepdims=True)) @ v)(x @ w), (X, W, V), 2),
    "a softmax": (lambda x, w, v: jax.nn.softmax(x @ w) @ v, (X, W, V), 2),
    "transposed": (lambda x, w, v: jnp.tanh((x @ w).T) @ v, (X, W, X), 1),
    "reshaped": (lambda x, w, v: jnp.tanh((x @ w).reshape(16, -1, WIDE)) @ v, (X, W, floats(16, WIDE, 256)), 1),
    "a weight's gradient and a bias's": (weight_and_bias, (X, H, X, W), 1),
}
SMALL = {
    "few features, one layer": (lambda x, w, v: jnp.tanh(x @ w) @ v, (G, U, V), 0),
    "few features, a bias": (lambda x, w, b, v: jax.nn.relu(x @ w + b[None]) @ v, (G, U, floats(WIDE), V), 0),
    "few features, a softmax": (lambda x, w, v: jax.nn.softmax(x @ w) @ v, (G, U, V), 2),
    "few classes, a weight's gradient": (lambda *xs: weight_and_bias(*xs)[0], (X, H, G, U), 0),
    "few classes, and a bias's": (weight_and_bias, (X, H, G, U), 1),
    "few classes, all gradients": (all_gradients, (X, H, G, U, V), 1),
}
PROGRAMS = {**SUMMED, **SMALL}
"""A program, its arguments, and how many results of the large product, in 16 bits, it stores."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_stored_of_a_product(name):
    check_temporaries(PROGRAMS[name], WHOLE)


@pytest.mark.slow
@compilers.needs("libtpu")
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_compiler_for_tpus_stores_as_much(name):
    check_compiled_temporaries(PROGRAMS[name], WHOLE)
