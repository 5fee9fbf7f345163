"""What loops read in every iteration is resharded once, before them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.compilers import COMPILERS, predicted_and_compiled

import sharding
from sharding import P

SIZES = {"data": 2, "model": 4}
X, W = jax.ShapeDtypeStruct((64, 256), "float32"), jax.ShapeDtypeStruct((256, 256), "float32")
ROWS, SQUARE = P("data", "model"), P("model", "data")


def layer(x, w):
    return jnp.tanh(sharding.annotate(x, P("data")) @ w)


def loop(x, w):
    return lax.fori_loop(0, 3, lambda _, y: layer(y, w), x)


def two_loops(x, w):
    return loop(loop(x, w) + 1, w)


def nested(x, w):
    return lax.fori_loop(0, 2, lambda _, y: loop(y, w) * 2, x)


def columns_moved(x, w):
    """A weight whose columns and rows change places takes more than one collective."""
    return lax.scan(lambda y, _: (layer(y, sharding.annotate(w, P(None, "model"))), None), x, length=3)[0]


def two_needs(x, w):
    """XLA moves each out of the loop on CPUs, but on TPUs and GPUs not all steps of several."""
    return lax.fori_loop(0, 3, lambda _, y: layer(y, w) + sharding.annotate(y, P(None, "model")) @ w, x)


def recomputed(x, w):
    return jax.grad(lambda w: (jax.checkpoint(loop)(x, w) ** 2).sum())(w)


def in_a_branch(x, w):
    return lax.fori_loop(0, 3, lambda i, y: lax.cond(i > 0, layer, lambda y, w: y + 1, y, w), x)


def gradient(x, w):
    return jax.grad(lambda w: (lax.scan(lambda y, _: (layer(y, w), None), x, length=3)[0] ** 2).sum())(w)


PROGRAMS = [loop, two_loops, nested, columns_moved, recomputed, in_a_branch, gradient]


def ledger(f):
    with sharding.mesh(SIZES):
        return sharding.jit(f, in_shardings=(ROWS, SQUARE), out_shardings=P("data")).complete(X, W).communication()


@pytest.mark.parametrize(("backend", "described"), COMPILERS.values())
@pytest.mark.parametrize("f", PROGRAMS)
def test_as_compiled(f, backend, described):
    predicted, compiled = predicted_and_compiled(f, (X, W), backend, described, SIZES, in_shardings=(ROWS, SQUARE))
    assert compiled == predicted


def test_the_weight_moves_once_and_for_the_line_that_reads_it():
    (move,) = [c for c in ledger(loop) if "before the loop" in c.cause]
    assert (move.kind, move.count) == ("all-gather", 1) and "operand 1 of dot_general, w, " in move.cause
    assert "(layer)" in move.source


@pytest.mark.parametrize(("f", "count"), [(nested, 1), (two_loops, 1), (columns_moved, 1), (two_needs, 2)])
def test_a_weight_moves_once_for_each_need(f, count):
    found = ledger(f)
    assert [c.count for c in found if c.result_bytes == 256 * 64 * 4 and c.kind == "all-gather"] == [1] * count


@pytest.mark.parametrize("f", [*PROGRAMS, two_needs])
def test_the_same_numbers(f):
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=s.shape).astype(np.float32) / 16 for s in (X, W))
    with sharding.mesh(SIZES):
        found = sharding.jit(f, in_shardings=(ROWS, SQUARE))(x, w)
        alone = jax.jit(f)(x, w)
    np.testing.assert_allclose(found, alone, rtol=2e-5, atol=1e-6)
