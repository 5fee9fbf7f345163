"""The first non-finite value, by its path or source line."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharding
from sharding import P
from sharding.jit import nonfinite


def loss(params, x):
    hidden = jax.nn.relu(x @ params["w1"])
    logits = jnp.log(hidden @ params["w2"])  # log(0) if no unit is active
    return jnp.mean(logits)


def arguments():
    return {"w1": jnp.ones((4, 8)), "w2": jnp.ones((8, 2))}, jnp.ones((3, 4))


def lines(f, *args):
    return [str(origin) for origin in nonfinite.origins(f, *args)]


def test_nothing_is_found_where_all_is_finite():
    assert lines(loss, *arguments()) == []


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["plain", "jit", "checkpoint"])
def test_the_line_that_makes_it(wrap):
    params, x = arguments()
    (found,) = lines(wrap(loss), params, -x)
    assert found.startswith("inf in float32[3, 2] of log at test_nonfinite.py:") and found.endswith("(loss)")


def test_an_argument_by_its_path():
    params, x = arguments()
    assert lines(loss, params | {"w2": params["w2"].at[1, 1].set(jnp.nan)}, x) == ["nan in args/0/w2"]


def test_the_first_nan_and_the_infinity_before_it():
    def f(x):
        big = jnp.exp(x)
        return jnp.sum(big - big)

    inf, nan = lines(f, jnp.full((2,), 100.0))
    assert inf.startswith("inf in float32[2] of exp") and nan.startswith("nan in float32[2] of sub")


def test_of_a_gradient_on_a_mesh():
    params, x = arguments()
    step = jax.value_and_grad(lambda params, x: jnp.sum(jnp.sqrt(params["w1"][0])) + jnp.sum(x))
    with sharding.mesh(data=2, tensor=2, devices=jax.devices()[:4]):
        params = params | {"w1": sharding.put(np.zeros((4, 8), np.float32), P(None, "tensor"))}
        found = lines(step, params, x)
    assert found and "test_nonfinite.py" in found[-1] and found[-1].startswith("inf")
