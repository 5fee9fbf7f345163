"""A barrier stands between a sum of which each device keeps a slice, and the parts that are taken of it."""

import jax
import jax.numpy as jnp
import pytest

import sharding
from sharding import P, compat

X, W = jax.ShapeDtypeStruct((32, 64), "float32"), jax.ShapeDtypeStruct((64, 16), "float32")
ROWS, SUMMED = P("a"), (P(None, "a"), P("a"))


def halves(y):
    return jnp.split(y, 2, axis=1)


def barriers(f, specs, scattered=ROWS, **sizes):
    """The number of barriers, and the collectives of `f` of a product whose result has a spec."""
    with sharding.mesh(sizes or {"a": 4}, devices=4):
        step = sharding.jit(lambda x, w: f(sharding.annotate(x @ w, scattered)), in_shardings=specs)
        eqns = compat.open_jaxpr(step.trace(X, W).jaxpr).eqns
        kinds = [c.kind for c in step.complete(X, W).communication()]
    return sum(eqn.primitive.name == "optimization_barrier" for eqn in eqns), kinds


@pytest.mark.parametrize("f", [halves, lambda y: y[:, :4], lambda y: jax.lax.dynamic_slice(y, (0, 2), (32, 4))])
def test_parts_of_a_scattered_sum(f):
    assert barriers(f, SUMMED) == (1, ["reduce-scatter"])


def test_parts_of_a_sum_that_is_scattered_over_one_of_its_axes():
    summed = P(None, ("a", "b")), P(("a", "b"))
    found, kinds = barriers(halves, summed, a=2, b=2)
    assert found == 1 and sorted(kinds) == ["all-reduce", "reduce-scatter"]


def test_what_is_not_a_part_of_a_scattered_sum():
    assert barriers(jnp.sin, SUMMED) == (0, ["reduce-scatter"])
    assert barriers(halves, SUMMED, scattered=P()) == (0, ["all-reduce"])  # every device keeps all of it
    assert barriers(halves, (P("a"), P())) == (0, [])  # no sum
    assert barriers(halves, (P(), P())) == (0, [])  # a slice of each operand
