"""A product that is only transposed becomes the product in the other order, with the same values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharding
from sharding.jit.simplification import simplify
from sharding.mesh import tracing_context

A, B = np.random.default_rng(0).normal(size=(2, 3, 4, 5)).astype(np.float32)


def weight_gradient(x, y):
    return jax.grad(lambda w: jnp.einsum("bsm,mhd->bshd", x, w).sum())(jnp.ones((5, 2, 2)))


def of_batches(x, y):
    return jnp.einsum("bsm,btm->bts", x, y)


def turned_twice(x, y):
    return jnp.einsum("bsm,bsn->mn", x, y).T.T


def of_mixed_precision(x, y):
    found = jax.lax.dot_general(x, y, (((0, 1), (0, 1)), ((), ())), precision=("highest", "default"))
    return found.T


def of_one_direction(x, y):
    """As a vmapped derivative along one direction has it: a dim of size 1 comes first in what it makes."""
    return jnp.einsum("obsm,bsn->omn", x[None], y).transpose(0, 2, 1)


def of_vectors(x, y):
    """Only dims of size 1 move: all orders are one array."""
    return jax.lax.dot_general(x[:1, :1], y[:1, :1], (((2,), (2,)), ((), ()))).transpose(1, 0, 2, 3)


def used_twice(x, y):
    product = jax.lax.dot_general(x, y, (((0, 1), (0, 1)), ((), ())))
    return product.T, product


def multiplied_again(x, y):
    return jax.lax.dot_general(x, y, (((0, 1), (0, 1)), ((), ()))).T @ x[0, 0]


def in_another_order(x, y):
    return jax.lax.dot_general(x, y, (((2,), (2,)), ((), ()))).transpose(0, 2, 1, 3)


def equations(f):
    closed = simplify(jax.make_jaxpr(f)(A, B))
    return closed, [eqn.primitive.name for eqn in getattr(closed, "jaxpr", closed).eqns]


@pytest.mark.parametrize(
    "f", [weight_gradient, of_batches, turned_twice, of_mixed_precision, of_one_direction, of_vectors]
)
def test_no_transposition_is_left(f):
    closed, names = equations(f)
    assert "transpose" not in names
    found = jax.core.eval_jaxpr(getattr(closed, "jaxpr", closed), closed.consts, A, B)
    np.testing.assert_allclose(found[0], f(A, B), rtol=1e-6)


@pytest.mark.parametrize("f", [used_twice, multiplied_again, in_another_order])
def test_transpositions_that_are_needed_stay(f):
    assert "transpose" in equations(f)[1]


def test_specs_that_name_no_axes_change_nothing():
    """A cotangent of a product has the spec of its operand where a mesh is in use, which names no Auto axis."""

    def gradients(x, y):
        x, cotangents = x.reshape(12, 5), y.reshape(12, 5)[None, :, :4]
        return jax.vmap(jax.linear_transpose(lambda w: x @ w.T, jnp.ones((4, 5))))(cotangents)[0]

    with sharding.mesh(data=8), tracing_context():
        traced = jax.make_jaxpr(gradients)(A, B)
        assert any(eqn.params.get("out_sharding") is not None for eqn in traced.eqns)
        closed = simplify(traced)
    before, after = ([eqn.primitive.name for eqn in one.eqns].count("transpose") for one in (traced, closed))
    assert after < before
    found = jax.core.eval_jaxpr(getattr(closed, "jaxpr", closed), closed.consts, A, B)
    np.testing.assert_allclose(found[0], gradients(A, B), rtol=1e-5)
