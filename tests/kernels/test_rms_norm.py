"""RMS norm: values and gradients of the reference, on one device and sharded, in both kernels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import kernel_checks
from support.kernel_checks import AHEAD_OF_TIME, MESHES, SIZES

from sharding import P, kernels
from sharding.kernels import row_kernel
from sharding.kernels.rms_norm import reference

RNG = np.random.default_rng(0)
SUMS = {"all-reduce": 3}
"""Of the gradients of the scale, of the loss, and of the loss' tuple on some compilers."""


def arrays(shape, dtype="float32"):
    x, scale = RNG.standard_normal(shape), RNG.standard_normal(shape[-1])
    return jnp.asarray(3 * x, dtype), jnp.asarray(scale, "float32")


def norm(implementation, epsilon=1e-6):
    return functools.partial(kernels.rms_norm, epsilon=epsilon, implementation=implementation)


@pytest.mark.parametrize("implementation", kernel_checks.interpreted())
@pytest.mark.parametrize(
    "shape, dtype",
    [((7, 128), "float32"), ((1, 256), "bfloat16"), ((3, 5, 384), "float32"), ((2, 2, 33, 128), "bfloat16")],
    ids=str,
)
def test_values_and_gradients(shape, dtype, implementation):
    kernel_checks.check(norm(implementation), reference, arrays(shape, dtype), (0, 1))


@pytest.mark.parametrize("shape", [(5, 7), (1100, 3), (2, 0, 8)], ids=str)
def test_odd_lengths(shape):
    kernel_checks.check(norm("mosaic_tpu"), reference, arrays(shape), (0, 1))


@pytest.mark.skipif(not kernel_checks.HAS_MOSAIC_GPU, reason="JAX 0.11 has today's GPU kernels")
def test_more_rows_than_programs(monkeypatch):
    monkeypatch.setattr(row_kernel, "MULTIPROCESSORS", 1)
    kernel_checks.check(norm("mosaic_gpu"), reference, arrays((11, 128)), (0, 1))


def test_epsilon():
    args = jnp.full((4, 8), 1e-4), jnp.ones(8)
    kernel_checks.check(norm("mosaic_tpu", epsilon=0.1), functools.partial(reference, epsilon=0.1), args, (0, 1))
    assert float(abs(norm("mosaic_tpu", epsilon=0.1)(*args)).max()) < 1e-3


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_sharded(sizes, seed):
    args = arrays((8, 16, 32))
    specs = kernel_checks.random_specs([x.shape for x in args], sizes, seed)
    most = SUMS | {"all-gather": 3, "all-to-all": 3}  # a sharded feature dim is moved in front of each kernel
    kernel_checks.check_sharded(norm("mosaic_tpu"), reference, args, (0, 1), specs, sizes, most)


def test_rows_stay_where_they_are():
    args = arrays((8, 16, 32))
    kernel_checks.check_sharded(
        norm("mosaic_tpu"), reference, args, (0, 1), (P("data", "tensor"), P()), MESHES[0], SUMS
    )


@pytest.mark.parametrize(("platform", "described"), AHEAD_OF_TIME)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compiles(platform, described, dtype):
    args = jax.ShapeDtypeStruct((8, 512, 1024), dtype), jax.ShapeDtypeStruct((1024,), "float32")
    kernel_checks.check_ahead_of_time(
        platform, described, kernels.rms_norm, args, (0, 1), (P("data", "tensor"), P()), SUMS
    )
