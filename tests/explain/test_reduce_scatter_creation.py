"""Sums of which every use takes a slice are reduce-scatters; a use that is dead code does not count."""

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
@pytest.mark.parametrize("is_read_by_dead_code", [True, False])
@pytest.mark.parametrize("f", [gradient, gradients_added])
def test_a_sum_of_which_each_device_keeps_a_part(f, is_read_by_dead_code, backend, described):
    args = jax.ShapeDtypeStruct((512, 1024), "float32"), jax.ShapeDtypeStruct((512, 512), "float32")
    specs = {"in_shardings": P("data"), "out_shardings": P("data")}

    def step(x, g):
        w = annotate(f(x, g), P())
        if is_read_by_dead_code:
            jnp.sin(w)
        return w

    predicted, compiled = predicted_and_compiled(step, args, backend, described, {"data": 2, "model": 4}, **specs)
    assert predicted == compiled
