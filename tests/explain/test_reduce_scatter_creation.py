"""Sums of which every use takes a slice are reduce-scatters."""

import jax
import jax.numpy as jnp
import pytest
from support.compilers import COMPILERS, predicted_and_compiled

from sharding import P, annotate


def gradient(x, g):
    return x.T @ g


def gradients_added(x, g):
    return (2 * x).T @ jnp.sin(g) + x.T @ g


@pytest.mark.parametrize(("backend", "described"), COMPILERS.values())
@pytest.mark.parametrize("f", [gradient, gradients_added])
def test_a_sum_of_which_each_device_keeps_a_part(f, backend, described):
    args = jax.ShapeDtypeStruct((512, 1024), "float32"), jax.ShapeDtypeStruct((512, 512), "float32")
    specs = {"in_shardings": P("data"), "out_shardings": P("data")}

    def step(x, g):
        return annotate(f(x, g), P())

    predicted, compiled = predicted_and_compiled(step, args, backend, described, {"data": 2, "model": 4}, **specs)
    assert predicted == compiled


@pytest.mark.parametrize(("backend", "described"), COMPILERS.values())
@pytest.mark.parametrize(
    ("batch", "spec"),
    [
        ("ab", P("a", "b")),
        ("ab", P(("b", "a"))),
        ("abc", P("a", ("b", "c"))),
        ("abc", P(("b", "a"))),
        ("abc", P(None, ("c", "b", "a"))),
        ("abc", P(None, ("a", "b", "c"))),
        ("bc", P("c", "b")),
        ("ba", P(("b", "a"))),
        ("cba", P(("c", "b", "a"))),
    ],
)
def test_a_sum_is_scattered_along_one_dim_in_the_order_of_its_groups(batch, spec, backend, described):
    """Else it is an all-reduce."""

    def step(w, x):
        return w - 0.1 * jax.grad(lambda w: jnp.square(jnp.tanh(x @ w)).mean())(w)

    args = jax.ShapeDtypeStruct((1024, 2048), "float32"), jax.ShapeDtypeStruct((8192, 1024), "float32")
    sizes, specs = {"a": 2, "b": 2, "c": 2}, (spec, P(tuple(batch)))
    predicted, compiled = predicted_and_compiled(step, args, backend, described, sizes, in_shardings=specs)
    assert predicted == compiled
