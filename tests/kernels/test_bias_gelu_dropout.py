"""Bias, GELU and dropout: values and gradients of plain JAX, with the masks of one device, in both kernels."""

import functools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from support import kernel_checks
from support.kernel_checks import AHEAD_OF_TIME, MESHES, SIZES

import sharding
from sharding import P, ShardingError, cost, kernels
from sharding.kernels import dropout_mask
from sharding.kernels.bias_gelu_dropout import GELU, IDENTITY, reference

RNG = np.random.default_rng(0)
KEY = jax.random.key(5)
SUMS = {"all-reduce": 3}
"""Of the gradients of the bias, of the loss, and of the loss' tuple on some compilers."""


def arrays(shape, dtype="float32"):
    x, bias = 2 * RNG.standard_normal(shape), RNG.standard_normal(shape[-1])
    return jnp.asarray(x, dtype), jnp.asarray(bias, dtype)


def fused(implementation, rate=0.25, approximate=True):
    def run(x, bias=None, key=KEY):
        options = {"rate": rate, "approximate": approximate, "implementation": implementation}
        return kernels.bias_gelu_dropout(x, bias, key, **options)

    return run


def plain(rate=0.25, **options):
    return lambda x, bias=None, key=KEY: reference(x, bias, key, rate, **options)


@pytest.mark.parametrize("implementation", kernel_checks.interpreted())
@pytest.mark.parametrize(
    "shape, dtype",
    [((7, 128), "float32"), ((256,), "bfloat16"), ((3, 5, 384), "float32"), ((2, 3, 2560), "bfloat16")],
    ids=str,
)
def test_values_and_gradients(shape, dtype, implementation):
    kernel_checks.check(fused(implementation), plain(), arrays(shape, dtype), (0, 1))


@pytest.mark.parametrize("implementation", kernel_checks.interpreted())
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no bias"])
def test_without_dropout(has_bias, implementation):
    args = arrays((5, 128))[: 1 + has_bias]
    for f, g in (
        (fused(implementation, rate=0.0), plain(rate=0)),
        (functools.partial(fused(implementation), key=None), plain(rate=0)),
    ):
        kernel_checks.check(f, g, args, range(len(args)))


@pytest.mark.parametrize("implementation", kernel_checks.interpreted())
def test_exact_gelu(implementation):
    f, g = fused(implementation, approximate=False), plain(activation=GELU)
    kernel_checks.check(f, g, arrays((5, 128)), (0, 1))


@pytest.mark.parametrize("implementation", kernel_checks.interpreted())
def test_dropout(implementation):
    x, _ = arrays((2, 9, 256))
    f = functools.partial(kernels.dropout, key=KEY, rate=0.5, implementation=implementation)
    kernel_checks.check(f, plain(0.5, activation=IDENTITY), (x,), (0,))
    np.testing.assert_array_equal(f(x), jnp.where(jax.random.bernoulli(KEY, 0.5, x.shape), 2 * x, 0))
    _, pullback = jax.vjp(f, x)
    assert all(leaf.size < x.size for leaf in jax.tree.leaves(pullback))
    assert kernels.dropout(x, None, rate=0.5) is kernels.dropout(x, KEY, rate=0.0) is x


@pytest.mark.parametrize("shape", [(5, 7), (300, 3), (10, 1100), (2, 0, 8), (1,)], ids=str)
def test_odd_lengths(shape):
    """Rows beyond a block, and pieces of rows."""
    kernel_checks.check(fused("mosaic_tpu"), plain(), arrays(shape), (0, 1))


def test_keeps_its_input_only():
    x, bias = arrays((4, 6, 32))
    _, pullback = jax.vjp(fused("mosaic_tpu"), x, bias)
    (kept,) = [leaf for leaf in jax.tree.leaves(pullback) if leaf.size >= x.size]
    np.testing.assert_array_equal(kept, x)


def test_old_keys_and_new_keys_are_alike():
    x, _ = arrays((4, 32))
    old, new = jax.random.PRNGKey(3), jax.random.key(3)
    for implementation in ("xla", "mosaic_tpu"):
        run = fused(implementation)
        np.testing.assert_array_equal(run(x, key=old), run(x, key=new))


def test_masks_beyond_32_bits():
    """Counters have 64 bits."""
    shape = (70_001, 140_003)
    place = dropout_mask.place(shape, KEY)
    counters = np.arange(shape[0], dtype=np.uint64) * shape[1]
    low, high = (np.asarray(x).view(np.uint32) for x in place.starts)
    np.testing.assert_array_equal(low, counters & 0xFFFFFFFF)
    np.testing.assert_array_equal(high, counters >> 32)
    at = 30_677  # the row in which the low word begins again
    assert low[at] > low[at + 1]
    mine = [x[at - 2 : at + 3, None] for x in place.starts]
    words = (place.words[0][None], place.words[1][None])
    found = dropout_mask.is_kept(dropout_mask.Place(tuple(mine), place.columns_F[None], words), 0.3)
    each = (counters[at - 2 : at + 3, None] + np.arange(shape[1], dtype=np.uint64)).ravel()
    counter = np.concatenate([each >> 32, each & 0xFFFFFFFF]).astype(np.uint32)
    bits = jax.extend.random.threefry_2x32(jax.random.key_data(KEY), jnp.asarray(counter)).reshape(2, -1)
    uniform = (np.asarray(bits[0] ^ bits[1]) >> 9) / 2**23
    np.testing.assert_array_equal(found.ravel(), uniform < np.float32(0.7))
    assert jnp.all(dropout_mask.place((3, 4), KEY).starts[0] == jnp.array([0, 4, 8]))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_sharded(sizes, seed):
    args = (*arrays((8, 16, 32)), KEY)
    specs = [*kernel_checks.random_specs([x.shape for x in args[:2]], sizes, seed), P()]
    most = SUMS | {"all-gather": 3, "all-to-all": 2, "collective-permute": 2}  # a bias is moved to the columns
    kernel_checks.check_sharded(fused("mosaic_tpu"), plain(), args, (0, 1), specs, sizes, most)


@pytest.mark.parametrize("implementation", ["xla", "mosaic_tpu"])
def test_masks_are_those_of_one_device(implementation):
    x = jnp.ones((8, 4, 64))
    expected = kernels.dropout(x, KEY, rate=0.5, implementation="xla")
    run = functools.partial(kernels.dropout, rate=0.5, implementation=implementation)
    for spec in (P("data"), P(None, "tensor", "data"), P(None, None, ("tensor", "data"))):
        with sharding.mesh(MESHES[0]):
            step = sharding.jit(run, in_shardings=(spec, P()))
            np.testing.assert_array_equal(step(x, KEY), expected)
            assert not list(step.complete(x, KEY).communication())


@pytest.mark.parametrize(("platform", "described"), AHEAD_OF_TIME)
@pytest.mark.parametrize(("dtype", "approximate"), [("float32", True), ("bfloat16", True), ("bfloat16", False)])
def test_compiles(platform, described, dtype, approximate):
    x, bias = jax.ShapeDtypeStruct((8, 36, 5120), dtype), jax.ShapeDtypeStruct((5120,), "float32")
    key = jax.eval_shape(lambda: jax.random.key(0))
    run, specs = fused("pallas", approximate=approximate), (P("data", None, "tensor"), P("tensor"), P())
    kernel_checks.check_ahead_of_time(platform, described, run, (x, bias, key), (0, 1), specs, SUMS)


@pytest.mark.parametrize(("platform", "described"), AHEAD_OF_TIME)
def test_large_arrays_compile(platform, described):
    """Of more than 2**32 elements, whose counters have two words."""
    x, key = jax.ShapeDtypeStruct((2**19, 16_384), "bfloat16"), jax.eval_shape(lambda: jax.random.key(0))
    with sharding.mesh(MESHES[0], devices=cost.compile_only(described)):
        step = sharding.jit(functools.partial(kernels.dropout, rate=0.1), in_shardings=(P("data", "tensor"), P()))
        assert not list(step.complete(x, key).communication())
        memory = step.lower(x, key).compile().memory_analysis()
    assert memory.temp_size_in_bytes < x.size / 8  # starts and columns; a mask would have a byte per element
    del platform


def test_masks_need_partitionable_random_numbers():
    with jax.threefry_partitionable(False), pytest.raises(ShardingError, match="jax_threefry_partitionable=True"):
        kernels.dropout(jnp.ones((2, 4)), KEY, rate=0.5, implementation="mosaic_tpu")


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda x: kernels.bias_gelu_dropout(x, jnp.ones(3)), r"bias \[4\]"),
        (lambda x: kernels.bias_gelu_dropout(x, None, KEY, rate=1.0), "at least 0 and less than 1"),
        (lambda x: kernels.dropout(x, KEY, rate=-0.5), "at least 0 and less than 1"),
        (lambda x: kernels.dropout(x, KEY, rate=0.5, implementation="triton"), "'mosaic_tpu', 'mosaic_gpu'"),
        (
            lambda x: kernels.dropout(x, jax.random.key(0, impl="rbg"), rate=0.5, implementation="mosaic_tpu"),
            "one key of threefry2x32",
        ),
        (
            lambda x: kernels.dropout(x, jax.random.split(KEY), rate=0.5, implementation="mosaic_tpu"),
            "one key of threefry2x32",
        ),
    ],
)
def test_errors(call, message):
    with pytest.raises(ShardingError, match=message):
        call(jnp.ones((2, 4)))
