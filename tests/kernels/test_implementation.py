"""The choice of an implementation, and what is said when one can't run."""

import warnings

import jax
import jax.numpy as jnp
import pytest

import sharding
from sharding import ShardingError, kernels
from sharding.compat import HAS_MOSAIC_GPU

X, SCALE = jnp.ones((4, 100)), jnp.ones(100)


def primitives(*args, **options):
    return str(jax.make_jaxpr(lambda *xs: kernels.rms_norm(*xs, **options))(*args))


def test_cpus_run_plain_jax():
    assert "kernel_call" not in primitives(X, SCALE)
    assert "kernel_call" in primitives(X, SCALE, implementation="mosaic_tpu")


@pytest.mark.parametrize(
    "devices",
    ["v5p:2x2x1", pytest.param("h100:1x4", marks=pytest.mark.skipif(not HAS_MOSAIC_GPU, reason="JAX 0.11 has them"))],
)
def test_the_platform_of_the_mesh_chooses(devices):
    x, scale = jnp.ones((4, 128)), jnp.ones(128)
    with sharding.mesh(data=4, devices=devices):
        assert "kernel_call" in primitives(x, scale)
        assert "kernel_call" not in primitives(x, scale, implementation="xla")


def test_auto_says_why_it_takes_the_reference():
    with (
        sharding.mesh(data=4, devices="h100:1x4"),
        pytest.warns(UserWarning, match="rms_norm runs as plain JAX; mosaic"),
    ):
        kernels.rms_norm(X, SCALE)
    with warnings.catch_warnings(), sharding.mesh(data=4, devices="v5p:2x2x1"):
        warnings.simplefilter("error")
        jax.eval_shape(kernels.rms_norm, X, SCALE)


@pytest.mark.parametrize(
    "devices, implementation, x, complaint",
    [
        (None, "cuda", X, "'auto', 'xla', 'mosaic_tpu', 'mosaic_gpu'"),
        (None, "mosaic_gpu", X, "multiple of 128|JAX 0.11"),
        (None, "mosaic_tpu", jnp.ones((2, 70_000)), "at most 32,768"),
        (None, "mosaic_tpu", jnp.ones((2, 128), "float8_e4m3fn"), "16 or 32 bits"),
        ("v5p:2x2x1", "mosaic_gpu", jnp.ones((2, 128)), "a mesh of GPUs|JAX 0.11"),
        ("h100:1x4", "mosaic_tpu", jnp.ones((2, 128)), "a mesh of TPUs"),
    ],
)
def test_errors(devices, implementation, x, complaint):
    with (
        sharding.mesh(data=-1) if devices is None else sharding.mesh(data=4, devices=devices),
        pytest.raises(ShardingError, match=complaint),
    ):
        kernels.rms_norm(x, jnp.ones(x.shape[-1]), implementation=implementation)


def test_the_table_says_what_auto_does():
    """Of operations that take any arrays: the first row of the platform is what runs."""
    table = kernels.implementations()
    assert {row.operation for row in table} < set(kernels.__all__)
    assert all(row.why for row in table)
    chosen = {}
    for row in table:
        for platform in row.platforms:
            chosen.setdefault((row.operation, platform), row.implementation)
    x = jax.ShapeDtypeStruct((8, 64, 8, 128), "float32")
    for devices, platform in (("v5p:2x2x2", "tpu"), ("h100:1x8", "gpu"), (None, "cpu")):
        with sharding.mesh(data=8, devices=devices):
            is_kernel = "kernel_call" in str(jax.make_jaxpr(lambda x: kernels.rotary(x))(x))
        assert is_kernel == (chosen["rotary", platform] != "xla")
    assert chosen["attention", "gpu"] == "cudnn"
    assert "operation" in repr(table).splitlines()[0]
