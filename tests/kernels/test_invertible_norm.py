"""Norms that keep their output: values and gradients of the norms that keep their input."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import kernel_checks
from support.kernel_checks import AHEAD_OF_TIME, MESHES, SIZES

from sharding import P, ShardingError, kernels
from sharding.kernels import row_kernel
from sharding.kernels.layer_norm import reference as layer_reference
from sharding.kernels.rms_norm import reference as rms_reference

RNG = np.random.default_rng(0)
SUMS = {"all-reduce": 4}
"""Of the gradients of scale and bias, of the loss, and of the loss' tuple on some compilers."""
NORMS = {"rms": (kernels.rms_norm, rms_reference, 1), "layer": (kernels.layer_norm, layer_reference, 2)}
NAMED = pytest.mark.parametrize("norm", NORMS)


def arrays(norm, shape, dtype="float32"):
    scale = RNG.uniform(0.5, 2, shape[-1]) * RNG.choice([-1, 1], shape[-1])
    vectors = [scale, RNG.standard_normal(shape[-1])][: NORMS[norm][2]]
    return tuple(jnp.asarray(x, dtype) for x in (3 * RNG.standard_normal(shape) + 1, *vectors))


def kept(norm, implementation, **options):
    return functools.partial(NORMS[norm][0], keep="output", implementation=implementation, **options)


@NAMED
@pytest.mark.parametrize("implementation", ["xla", *kernel_checks.interpreted()])
@pytest.mark.parametrize(
    "shape, dtype",
    [
        pytest.param((7, 128), "float32", marks=pytest.mark.slow),
        ((128,), "float32"),
        ((3, 5, 384), "float32"),
        ((2, 2, 33, 128), "bfloat16"),
    ],
    ids=str,
)
def test_values_and_gradients(norm, shape, dtype, implementation):
    args = arrays(norm, shape, dtype)
    kernel_checks.check(kept(norm, implementation), NORMS[norm][1], args, range(len(args)))


@NAMED
@pytest.mark.parametrize("shape", [(5, 7), (300, 3), (33, 40_000 // 2), (2, 0, 8)], ids=str)
def test_odd_lengths(norm, shape):
    """Blocks of 128, of 32 rows, and none."""
    args = arrays(norm, shape)
    kernel_checks.check(kept(norm, "mosaic_tpu"), NORMS[norm][1], args, range(len(args)))


@NAMED
def test_more_rows_than_a_block(norm):
    args = arrays(norm, (300, 128))
    kernel_checks.check(kept(norm, "mosaic_tpu"), NORMS[norm][1], args, range(len(args)))


@NAMED
@pytest.mark.skipif(not kernel_checks.HAS_MOSAIC_GPU, reason="JAX 0.11 has today's GPU kernels")
def test_more_rows_than_programs(norm, monkeypatch):
    monkeypatch.setattr(row_kernel, "MULTIPROCESSORS", 1)
    args = arrays(norm, (11, 128))
    kernel_checks.check(kept(norm, "mosaic_gpu"), NORMS[norm][1], args, range(len(args)))


@NAMED
@pytest.mark.parametrize("implementation", ["xla", "mosaic_tpu"])
def test_epsilon(norm, implementation):
    x, *vectors = arrays(norm, (4, 8))
    reference = functools.partial(NORMS[norm][1], epsilon=0.1)
    kernel_checks.check(kept(norm, implementation, epsilon=0.1), reference, (1e-2 * x, *vectors), (0, 1))


@NAMED
@pytest.mark.parametrize("implementation", ["xla", "mosaic_tpu"])
def test_keeps_the_output_and_a_number_per_row(norm, implementation):
    x, *vectors = arrays(norm, (6, 4, 32))
    y, pullback = jax.vjp(lambda x: kept(norm, implementation)(x, *vectors), x)
    saved = [leaf for leaf in jax.tree.leaves(pullback) if leaf.ndim > 1]
    assert sorted(leaf.shape for leaf in saved) == [(6, 4), (6, 4, 32)]
    np.testing.assert_array_equal(max(saved, key=jnp.size), y)


@NAMED
def test_gradients_without_scale_are_nan(norm):
    x, scale, *bias = arrays(norm, (4, 8))
    for implementation in ("xla", "mosaic_tpu"):
        run = kept(norm, implementation)
        _, pullback = jax.vjp(lambda scale, run=run: run(x, scale, *bias), scale.at[3].set(0))
        assert jnp.isnan(pullback(x)[0][3])


@NAMED
@pytest.mark.parametrize("implementation", ["xla", "mosaic_tpu"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_sharded(norm, sizes, seed, implementation):
    args = arrays(norm, (8, 16, 32))
    specs = kernel_checks.random_specs([x.shape for x in args], sizes, seed)
    most = SUMS | {"all-gather": 4, "all-to-all": 3}  # a sharded feature dim is moved in front of each kernel
    if implementation == "xla":  # which sums along a sharded feature dim
        most |= {"all-reduce": 9, "all-gather": 6, "all-to-all": 4, "collective-permute": 2}
    run = kept(norm, implementation)
    kernel_checks.check_sharded(run, NORMS[norm][1], args, range(len(args)), specs, sizes, most)


@NAMED
def test_rows_stay_where_they_are(norm):
    args = arrays(norm, (8, 16, 32))
    specs = (P("data", "tensor"), *[P()] * (len(args) - 1))
    run = kept(norm, "mosaic_tpu")
    kernel_checks.check_sharded(run, NORMS[norm][1], args, range(len(args)), specs, MESHES[0], SUMS)


@NAMED
@pytest.mark.parametrize(("platform", "described"), AHEAD_OF_TIME)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compiles(norm, platform, described, dtype):
    x, *vectors = jax.ShapeDtypeStruct((8, 500, 1024), dtype), *[jax.ShapeDtypeStruct((1024,), "float32")] * 2
    args = (x, *vectors[: NORMS[norm][2]])
    run = functools.partial(NORMS[norm][0], keep="output")
    specs = (P("data", "tensor"), *[P()] * (len(args) - 1))
    kernel_checks.check_ahead_of_time(platform, described, run, args, range(len(args)), specs, SUMS)


@pytest.mark.parametrize(("platform", "described"), AHEAD_OF_TIME)
def test_longest_rows_compile(platform, described):
    args = jax.ShapeDtypeStruct((64, 16_384), "float32"), jax.ShapeDtypeStruct((16_384,), "float32")
    run = functools.partial(kernels.rms_norm, keep="output")
    kernel_checks.check_ahead_of_time(platform, described, run, args, (0, 1), (P("data"), P()), SUMS)


def test_errors():
    with pytest.raises(ShardingError, match="required: 'input' or 'output'"):
        kernels.rms_norm(jnp.ones((2, 4)), jnp.ones(4), keep="both")
