"""Slices of arrays side by side are the arrays again."""

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


def whole(x, y):
    return jnp.concatenate([x, y])[4:] * 2


def within(x, y):
    return jnp.concatenate([x, y])[1:3] * 2


def of_nested(x, y):
    return jnp.concatenate([jnp.concatenate([x, y]), x])[4:6, 1:3] * 2


def of_a_row(x, y):
    return jnp.stack([x[0], y[1]])[1] * 2


def along_columns(x, y):
    return jnp.concatenate([x[:3], y], 1)[:, 6:] * 2


def everything(x, y):
    return lax.slice(x, (0, 0), x.shape) + y[0, 0]


SIMPLER = {
    whole: ["mul"],
    within: ["slice", "mul"],
    of_nested: ["slice", "mul"],
    of_a_row: ["slice", "squeeze", "mul"],
    along_columns: ["mul"],
    everything: ["slice", "squeeze", "add"],
}


def across(x, y):
    return jnp.concatenate([x, y])[3:5] * 2


def with_gaps(x, y):
    return jnp.concatenate([x, y])[::2] * 2


def of_a_part_of_a_row(x, y):
    return jnp.stack([x[0], y[1]], 1)[2:, :1] * 2


def returned(x, y):
    both = jnp.concatenate([x, y])
    return both, both[3:5]


def broadcast(x, y):
    return lax.broadcast_in_dim(x[0], (6, 6), (1,)) + y[0, 0]


STAYING = [across, of_a_part_of_a_row, with_gaps, returned, broadcast]


@pytest.mark.parametrize("f", [*SIMPLER, *STAYING])
def test_values_are_the_same(f):
    jaxpr, consts = simplified(f, X, Y)
    for a, b in zip(jax.core.eval_jaxpr(jaxpr, consts, X, Y), jax.tree.leaves(f(X, Y)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("f", SIMPLER)
def test_nothing_is_put_side_by_side_to_be_sliced(f):
    assert primitives(f, X, Y) == SIMPLER[f]


@pytest.mark.parametrize("f", STAYING)
def test_the_rest_stays(f):
    closed = jax.make_jaxpr(f)(X, Y)
    assert simplify(closed) is closed


def test_a_part_with_a_name_keeps_it():
    """An op between, such as a name, is not looked through."""
    named = jax.make_jaxpr(lambda x, y: jnp.concatenate([jax.named_call(jnp.sin, name="s")(x), y])[:4])(X, Y)
    assert "sin" in str(simplify(named))
