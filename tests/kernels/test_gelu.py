"""GELU alone: values and gradients of plain JAX in both kernels, of which only that of GPUs runs by itself."""

import jax
import jax.numpy as jnp
import pytest
from support import kernel_checks

import sharding
from sharding import kernels
from sharding.compat import HAS_MOSAIC_GPU


def gelu(implementation):
    return lambda x: kernels.gelu(x, implementation=implementation)


@pytest.mark.parametrize("implementation", kernel_checks.interpreted())
@pytest.mark.parametrize("shape, dtype", [((7, 128), "float32"), ((2, 3, 384), "bfloat16")], ids=str)
def test_values_and_gradients(shape, dtype, implementation):
    x = 4 * jax.random.normal(jax.random.key(0), shape, dtype)
    kernel_checks.check(gelu(implementation), lambda x: jax.nn.gelu(x.astype("float32")).astype(x.dtype), (x,), (0,))


@pytest.mark.parametrize("implementation", kernel_checks.interpreted())
def test_large_inputs(implementation):
    x = jnp.array([-1e4, -100.0, -20.0, 0.0, 20.0, 1e4] + 122 * [1.0])
    kernel_checks.check(gelu(implementation), jax.nn.gelu, (x,), (0,))


@pytest.mark.parametrize("devices", ["v5p:2x2x2", None, *(["h100:1x8"] if HAS_MOSAIC_GPU else [])])
def test_a_kernel_on_gpus_only(devices):
    x = jax.ShapeDtypeStruct((16, 128), "bfloat16")
    with sharding.mesh(data=8, devices=devices):
        is_kernel = "kernel_call" in str(jax.make_jaxpr(lambda x: kernels.gelu(x))(x))
    assert is_kernel == (devices == "h100:1x8")
