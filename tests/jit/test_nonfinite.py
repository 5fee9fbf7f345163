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


def masked_loss(x, mask):
    scores = jnp.where(mask, x, -jnp.inf)
    return -jnp.mean(jnp.log(jax.nn.softmax(scores)[:, 0]))


def test_infinities_that_a_softmax_makes_zeros_are_no_fault():
    assert lines(masked_loss, jnp.ones((2, 3)), jnp.array([True, True, False])) == []
    assert lines(lambda x: jnp.min(x), jnp.array([1.0, jnp.inf])) == []  # an argument
    assert lines(lambda x: (jnp.argmax(jnp.log(x)), jnp.where(x > 0, x / x, 0.0)), jnp.arange(2.0)) == []


def test_not_the_mask_but_the_infinity_that_reaches_a_result():
    (found,) = lines(masked_loss, jnp.array([[-500.0, 0, 0]]), jnp.array([True, True, False]))
    assert found.startswith("inf in float32[1] of log")


def test_a_result_that_a_constant_makes_infinite():
    (found,) = lines(masked_loss, jnp.ones((2, 3)), jnp.array([False, True, True]))
    assert found.startswith("inf in float32[2] of log")
    (found,) = lines(lambda x: jnp.max(jnp.where(x > 1, x, -jnp.inf)), jnp.zeros(3))
    assert found.startswith("inf in float32[") and "test_nonfinite.py" in found
    (found,) = lines(lambda x: x * jnp.nan, jnp.zeros(3))
    assert found.startswith("nan in float32[3] of mul")


def test_a_row_without_anything_to_attend_to():
    found = lines(masked_loss, jnp.ones((2, 3)), jnp.array([False, False, False]))
    assert found[-1].startswith("nan in float32[2, 3] of sub") and all(one.startswith("inf") for one in found[:-1])


def test_a_nan_that_a_mask_hides_until_the_gradient():
    def f(x):
        return jnp.sum(jnp.where(x > 0, jnp.sqrt(x), 0.0))

    x = jnp.array([1.0, 0.0])
    assert lines(f, x) == []
    found = lines(jax.grad(f), x)  # 0 * inf, where the derivative of sqrt is infinite
    assert found[-1].startswith("nan in float32[2] of mul") and found[0].startswith("inf in float32[2]")


def test_the_first_infinities_where_there_is_no_nan():
    found = nonfinite.origins(lambda x, y: (1 / x, jnp.log(x), y), jnp.zeros(2), jnp.full(3, jnp.inf), limit=2)
    assert [origin.value.split(" ")[0] for origin in found] == ["args/1", "float32[2]"] and " div " in found[1].value
