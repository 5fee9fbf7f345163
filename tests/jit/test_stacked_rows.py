"""Rows of stacks are the arrays that were stacked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from sharding.jit.simplification import simplify

X = np.arange(24, dtype=np.float32).reshape(4, 6)
Y = -X[:3]


def simplified(f, *args):
    closed = simplify(jax.make_jaxpr(f)(*args))
    return getattr(closed, "jaxpr", closed), closed.consts


def primitives(f, *args):
    return [eqn.primitive.name for eqn in simplified(f, *args)[0].eqns]


def stacked(x, y):
    return jnp.stack([x[0], y[1]])[1] * 2


def of_single_rows(x, y):
    return jnp.concatenate([x[:1], y[:1], y[1:2]])[1:2] * 2


def of_columns(x, y):
    return jnp.stack([x[0], y[1]], 1)[:, 1] * 2


def of_a_stack_of_stacks(x, y):
    return jnp.stack([jnp.stack([x[0], y[1]]), x[:2]])[0][1] * 2


def everything(x, y):
    return lax.slice(x, (0, 0), x.shape) + y[0, 0]


SIMPLER = {
    stacked: ["slice", "squeeze", "mul"],
    of_single_rows: ["slice", "mul"],
    of_columns: ["slice", "squeeze", "mul"],
    of_a_stack_of_stacks: ["slice", "squeeze", "mul"],
    everything: ["slice", "squeeze", "add"],
}


def of_several_rows(x, y):
    return jnp.concatenate([x[:1], y[:1], y[1:2]])[1:] * 2


def of_a_part_of_a_row(x, y):
    return jnp.concatenate([x[:1], y[:1]])[1:, :4] * 2


def of_larger_parts(x, y):
    return jnp.concatenate([x, y])[4:] * 2


def returned(x, y):
    both = jnp.concatenate([x[:1], y[:1]])
    return both, both[:, 1:]


def broadcast(x, y):
    return lax.broadcast_in_dim(x[0], (6, 6), (1,)) + y[0, 0]


STAYING = [broadcast, of_a_part_of_a_row, of_larger_parts, of_several_rows, returned]


@pytest.mark.parametrize("f", [*SIMPLER, *STAYING])
def test_values_are_the_same(f):
    jaxpr, consts = simplified(f, X, Y)
    for a, b in zip(jax.core.eval_jaxpr(jaxpr, consts, X, Y), jax.tree.leaves(f(X, Y)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("f", SIMPLER)
def test_nothing_is_stacked_to_be_sliced(f):
    assert primitives(f, X, Y) == SIMPLER[f]


@pytest.mark.parametrize("f", STAYING)
def test_the_rest_stays(f):
    closed = jax.make_jaxpr(f)(X, Y)
    assert simplify(closed) is closed
