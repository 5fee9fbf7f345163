"""The first non-finite value, by its path or source line."""

import re

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


def halved(x, _=None):
    return jnp.log(x) + 1, x


def scanned(x):
    return jax.lax.scan(halved, x, None, length=20)[0]


def scanned_backwards(x):
    return jax.lax.scan(lambda c, row: (c + jnp.sqrt(row), row), 0.0, x, reverse=True)[0]


def repeated(x):
    return jax.lax.while_loop(lambda c: c[0] < 9, lambda c: (c[0] + 1, halved(c[1])[0]), (0, x))[1]


def branched(x):
    return jax.lax.cond(x > 0, lambda x: halved(x - 2)[0], lambda x: x, x)


def nested(x):
    return jax.lax.fori_loop(0, 3, lambda i, x: scanned(x), x)


def with_infinite_start(x):
    """A running maximum, which starts at an infinity that is no fault."""
    rows = jnp.stack([x, x, -x])
    return jax.lax.scan(lambda c, row: (jnp.maximum(c, row), jnp.log(row)), -jnp.inf, rows)[1]


IN_BODIES = [
    # log(log(0.5) + 1) + 1 = -0.18: the next logarithm is nan
    (scanned, 0.5, r"nan in float32\[\] of log at .*\(halved\), iteration 2 of the scan"),
    (scanned_backwards, jnp.array([1.0, -1.0, 4.0]), r"nan in float32\[\] of sqrt at .*, iteration 1 of the scan"),
    (repeated, 0.5, r"nan in float32\[\] of log at .*\(halved\), iteration 2 of the while"),
    (branched, 1.0, r"nan in float32\[\] of log at .*\(halved\)"),
    (
        nested,
        0.5,
        r"nan in float32\[\] of log at .*\(halved\), iteration 2 of the scan, iteration 0 of the (scan|while)",
    ),
    (with_infinite_start, 2.0, r"nan in float32\[\] of log at .*, iteration 2 of the scan"),
]


@pytest.mark.parametrize(("f", "x", "pattern"), IN_BODIES)
def test_the_line_and_iteration_in_a_loop_or_branch(f, x, pattern):
    *_, found = lines(f, jnp.asarray(x))
    assert re.fullmatch(pattern, found)


def test_the_line_and_iteration_in_a_gradient():
    *_, found = lines(jax.grad(scanned), jnp.asarray(0.5))
    assert re.fullmatch(r"nan in float32\[\] of log at .*\(halved\), iteration 2 of the scan", found)


def test_debug_nans_names_the_op_in_a_loop():
    with sharding.mesh(data=2, tensor=4), jax.debug_nans(True):
        step = sharding.jit(scanned, in_shardings=P("data"))
        assert bool(jnp.isfinite(step(jnp.ones(8))).all())
        with pytest.raises(
            FloatingPointError, match=r"scanned: nan in .* of log at .*\(halved\), iteration 2 of the scan"
        ):
            step(jnp.full(8, 0.5))
