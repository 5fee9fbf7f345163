"""Softmax of scaled and masked scores: values and gradients of the reference, in both kernels and sharded."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import kernel_checks
from support.kernel_checks import AHEAD_OF_TIME, MESHES, SIZES

from sharding import P, ShardingError, kernels
from sharding.kernels.scaled_softmax import reference

RNG = np.random.default_rng(0)
ONE = {"all-reduce": 1}
"""Of the loss."""


def scores(shape, dtype="float32"):
    return jnp.asarray(4 * RNG.standard_normal(shape), dtype)


def mask(shape):
    return jnp.asarray(RNG.random(shape) < 0.6)


def softmax(implementation, mask=None, scale=0.5):
    return functools.partial(kernels.scaled_softmax, mask=mask, scale=scale, implementation=implementation)


@pytest.mark.parametrize("has_mask", [False, True])
@pytest.mark.parametrize("implementation", kernel_checks.interpreted())
@pytest.mark.parametrize("shape, dtype", [((7, 128), "float32"), ((2, 3, 33, 256), "bfloat16")], ids=str)
def test_values_and_gradients(shape, dtype, implementation, has_mask):
    seen = mask(shape) if has_mask else None
    expected = functools.partial(reference, mask=seen, scale=0.5)
    kernel_checks.check(softmax(implementation, seen), expected, [scores(shape, dtype)], (0,))


@pytest.mark.parametrize("implementation", ["xla", *kernel_checks.interpreted()])
def test_rows_without_a_score_are_zero(implementation):
    seen = mask((4, 128)).at[1].set(False)
    found = kernel_checks.with_gradients(softmax(implementation, seen), (0,))(scores((4, 128)))
    assert not any(np.asarray(x[1]).any() for x in (found[0], found[1][0]))
    np.testing.assert_allclose(found[0].sum(-1), [1, 0, 1, 1], rtol=1e-5)


def test_scores_below_the_masked_ones():
    x = jnp.array([[-1e35, -2e35, 0.0]])
    found = softmax("mosaic_tpu", jnp.array([[True, True, False]]), scale=1.0)(x)
    np.testing.assert_allclose(found, [[1, 0, 0]])


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_sharded(sizes, seed):
    args = scores((8, 16, 32)), mask((8, 16, 32))
    specs = kernel_checks.random_specs([x.shape for x in args], sizes, seed)
    most = ONE | {"all-gather": 4, "all-to-all": 4}
    f = functools.partial(kernels.scaled_softmax, implementation="mosaic_tpu")
    kernel_checks.check_sharded(f, reference, args, (0,), specs, sizes, most)


def test_rows_stay_where_they_are():
    f = softmax("mosaic_tpu")
    specs = (P("data", "tensor"),)
    expected = functools.partial(reference, scale=0.5)
    kernel_checks.check_sharded(f, expected, [scores((8, 16, 32))], (0,), specs, MESHES[0], ONE)


@pytest.mark.parametrize(("platform", "described"), AHEAD_OF_TIME)
@pytest.mark.parametrize("has_mask", [False, True])
def test_compiles(platform, described, has_mask):
    like = jax.ShapeDtypeStruct((8, 512, 1024), "bfloat16"), jax.ShapeDtypeStruct((8, 512, 1024), "bool")
    args = like[: 1 + has_mask]
    kernel_checks.check_ahead_of_time(
        platform, described, kernels.scaled_softmax, args, (0,), (P("data", "tensor"),) * len(args), ONE
    )


@pytest.mark.parametrize("wrong", [jnp.ones((8,), bool), jnp.ones((4, 8))], ids=["shape", "dtype"])
def test_errors(wrong):
    with pytest.raises(ShardingError, match="a boolean mask of the shape of the scores"):
        kernels.scaled_softmax(scores((4, 8)), wrong)
