"""Layout constraints in the program of a nested function are differentiated and batched with it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import jet

import sharding
from sharding import P


def filtered(x, w):
    return jnp.fft.irfft(jnp.fft.rfft(x) * jnp.fft.rfft(w)[None])


def along(f, x):
    return jet.jet(f, (x,), ([jnp.ones_like(x), jnp.zeros_like(x)],))


TRANSFORMED = {
    "grad": lambda f: jax.grad(lambda x, w: jnp.sum(jnp.sin(f(x, w))), argnums=(0, 1)),
    "jvp": lambda f: lambda x, w: jax.jvp(f, (x, w), (jnp.cos(x), jnp.sin(w))),
    "hessian": lambda f: lambda x, w: jax.hessian(lambda v: jnp.sum(jnp.sin(f(x, v))))(w),
    "vmap": lambda f: jax.vmap(f, (None, 0)),
    "jet": lambda f: lambda x, w: along(lambda v: f(v, w), x),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_transformed_around_a_nested_function(name):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 8)), jnp.float32)
    w = x if name == "vmap" else x[0]
    expected = jax.jit(TRANSFORMED[name](filtered))(x, w)
    with sharding.mesh({"x": 2, "y": 2}, devices=jax.devices()[:4]):
        inner = sharding.jit(filtered, in_shardings=(P("x"), None))
        found = sharding.jit(TRANSFORMED[name](inner))(x, w)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
