"""Rotary position embedding: complex multiplication, its inverse as derivative, on one device and sharded."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import kernel_checks
from support.kernel_checks import AHEAD_OF_TIME, MESHES, SIZES

import sharding
from sharding import P, ShardingError, kernels

RNG = np.random.default_rng(0)
SUMS = {"all-reduce": 3}
"""Of the loss, and of its tuple on some compilers."""


def array(shape, dtype="float32"):
    return jnp.asarray(RNG.standard_normal(shape), dtype)


def rotary(implementation, **options):
    return functools.partial(kernels.rotary, implementation=implementation, **options)


def by_complex_numbers(x, positions, *, base=1e4, features=None, frequencies=None, interleaved=False):
    """Each pair as a complex number, times exp(i angle), in double precision."""
    half = (features or x.shape[-1]) // 2
    x = np.asarray(x, np.float64)
    own, rest = x[..., : 2 * half], x[..., 2 * half :]
    real, imag = (own[..., ::2], own[..., 1::2]) if interleaved else (own[..., :half], own[..., half:])
    speed = base ** (-np.arange(half) / half) if frequencies is None else frequencies
    z = (real + 1j * imag) * np.exp(1j * np.asarray(positions, np.float64)[..., None, None] * speed)
    if interleaved:
        return np.concatenate([np.stack([z.real, z.imag], -1).reshape(own.shape), rest], -1)
    return np.concatenate([z.real, z.imag, rest], -1)


FORMS = [
    {},
    {"interleaved": True},
    {"features": 8},
    {"features": 8, "interleaved": True},
    {"base": 500.0},
    {"frequencies_H": np.linspace(1, 0, 16, dtype="float32")},
]


@pytest.mark.parametrize("implementation", ["xla", "mosaic_tpu"])
@pytest.mark.parametrize("options", FORMS, ids=str)
def test_pairs_are_complex_numbers(options, implementation):
    x, positions = array((2, 5, 3, 32)), RNG.integers(0, 100, (2, 5))
    known = {name.removesuffix("_H"): value for name, value in options.items()}
    for at in (positions, positions[0]):
        found = rotary(implementation, **options)(x, jnp.asarray(at))
        np.testing.assert_allclose(found, by_complex_numbers(x, at, **known), rtol=0, atol=5e-5)


def test_positions_are_counted_from_0_and_may_be_fractions():
    x = array((1, 6, 1, 8))
    np.testing.assert_array_equal(kernels.rotary(x), kernels.rotary(x, jnp.arange(6)))
    halves = np.arange(6) / 2
    np.testing.assert_allclose(
        kernels.rotary(x, jnp.asarray(halves, "float32")), by_complex_numbers(x, halves), atol=5e-6
    )


@pytest.mark.parametrize("implementation", kernel_checks.interpreted())
@pytest.mark.parametrize(
    "shape, dtype",
    [
        pytest.param((64, 2, 32), "float32", marks=pytest.mark.slow),
        ((2, 37, 3, 64), "bfloat16"),
        ((2, 1, 130, 1, 128), "float32"),
        pytest.param((3, 64, 5, 96), "bfloat16", marks=pytest.mark.slow),
    ],
    ids=str,
)  # fmt: skip
def test_values_and_gradients(shape, dtype, implementation):
    for positions in (None, jnp.asarray(RNG.integers(0, 1000, shape[:-2]))):
        args = (array(shape, dtype),) if positions is None else (array(shape, dtype), positions)
        kernel_checks.check(rotary(implementation), rotary("xla"), args, (0,))


@pytest.mark.parametrize(
    "options", [{"interleaved": True}, {"features": 24}, {"features": 24, "interleaved": True}], ids=str
)
@pytest.mark.parametrize("shape", [(2, 0, 1, 32), (1, 7, 2, 32), (2, 600, 1, 40)], ids=str)
def test_forms_of_the_tpu_kernel(shape, options):
    kernel_checks.check(rotary("mosaic_tpu", **options), rotary("xla", **options), (array(shape),), (0,))


def test_gradients_are_the_inverse_rotation_and_keep_nothing_of_the_input():
    x, positions = array((2, 16, 3, 32)), jnp.arange(16) * 7
    turned, pullback = jax.vjp(lambda x: kernels.rotary(x, positions, implementation="mosaic_tpu"), x)
    np.testing.assert_allclose(pullback(turned)[0], x, atol=1e-5)
    assert all(y.size < x.size for y in jax.tree.leaves(pullback))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_sharded(sizes, seed):
    args = array((8, 16, 8, 32)), jnp.asarray(RNG.integers(0, 100, (8, 16)))
    specs = kernel_checks.random_specs([x.shape for x in args], sizes, seed)
    most = SUMS | {"all-gather": 6, "all-to-all": 4, "collective-permute": 2}  # positions and features are moved
    kernel_checks.check_sharded(rotary("mosaic_tpu"), rotary("xla"), args, (0,), specs, sizes, most)


@pytest.mark.parametrize("spec", [P("data", None, "tensor"), P(None, "tensor", "data")], ids=str)
def test_batch_positions_and_heads_stay_where_they_are(spec):
    kernel_checks.check_sharded(
        rotary("mosaic_tpu"), rotary("xla"), (array((4, 16, 4, 32)),), (0,), (spec,), MESHES[0], SUMS
    )


@pytest.mark.parametrize(("platform", "described"), AHEAD_OF_TIME)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("features", [64, 128])
def test_compiles(platform, described, dtype, features):
    args = (jax.ShapeDtypeStruct((8, 500, 8, features), dtype),)
    kernel_checks.check_ahead_of_time(
        platform, described, rotary("pallas"), args, (0,), (P("data", None, "tensor"),), SUMS
    )


def test_auto_is_the_kernel_on_tpus_only():

    for devices, is_kernel in (("v5p:2x2x2", True), ("h100:1x8", False)):
        with sharding.mesh(data=8, devices=devices):
            traced = jax.make_jaxpr(lambda x: kernels.rotary(x))(jax.ShapeDtypeStruct((8, 64, 8, 128), "float32"))
        assert ("kernel_call" in str(traced)) == is_kernel


@pytest.mark.parametrize(
    "shape, positions, options, message",
    [
        ((4, 8), None, {}, r"x \[..., S, N, D\]"),
        ((4, 2, 7), None, {}, "an even number of features from 2 to 7"),
        ((4, 2, 8), None, {"features": 10}, "an even number of features from 2 to 8"),
        ((2, 4, 2, 8), (2,), {}, r"positions \[4\] or \[2, 4\]"),
        ((4, 2, 8), None, {"frequencies_H": np.ones(3)}, r"\[4\], one for each pair of 8 features"),
        ((4, 2, 8), None, {"implementation": "cudnn"}, "'mosaic_tpu', 'mosaic_gpu'"),
    ],
    ids=str,
)
def test_errors(shape, positions, options, message):
    at = None if positions is None else jnp.zeros(positions)
    with pytest.raises(ShardingError, match=message):
        kernels.rotary(jnp.ones(shape), at, **options)


@pytest.mark.skipif(not kernel_checks.HAS_MOSAIC_GPU, reason="JAX 0.11 has today's GPU kernels")
@pytest.mark.parametrize(
    "features, options, message",
    [
        (256, {}, "at most 128"),
        (128, {"interleaved": True}, "interleaved=False"),
        (64, {"features": 32}, "features=64"),
    ],
    ids=str,
)
def test_what_the_gpu_kernel_can_not_take(features, options, message):
    with pytest.raises(ShardingError, match=message):
        kernels.rotary(jnp.ones((64, 1, features)), implementation="mosaic_gpu", **options)
