"""What the compilers of the platforms store; peaks of GPT steps against XLA:GPU, ahead of time."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest
from support import compilers
from support.compilers import COMPILERS
from support.peak_memory import check_compiled_temporaries
from support.train_steps.small_models import gpt_step

import sharding
from sharding import P, cost
from sharding.explain.peak_error import PEAK_ERRORS
from sharding.memory import usage
from sharding.memory.compiler_traits import TRAITS

N = 256
HALF = jax.ShapeDtypeStruct((N, N), "bfloat16")
FULL = jax.ShapeDtypeStruct((N, N), "float32")


def temporaries(f, *args, platform, sizes=None, **options):
    """Bytes of temporaries on one device."""
    with sharding.mesh(sizes or {"data": 1}, devices=None if sizes else jax.devices()[:1]):
        return usage(sharding.jit(f, **options).complete(*args).assignment, platform=platform).temporary_bytes


def summed_over_devices(x, w):
    return ((x @ w) @ jnp.ones((N, N), "bfloat16")).astype("float32").sum()


def scattered(x, w):
    return sharding.annotate(x @ w, P("data"))


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_sums_of_16_bits(platform):
    """Two products, the sum of one and a constant, in 16 bits; a CPU reduces in 32."""
    options = {"sizes": {"data": 8}, "in_shardings": (P(None, "data"), P("data"))}
    found = temporaries(summed_over_devices, HALF, HALF, platform=platform, **options)
    assert found <= 4 * N * N * 2 < temporaries(summed_over_devices, HALF, HALF, platform="cpu", **options)


@pytest.mark.parametrize(("platform", "share"), [("cpu", 1), ("gpu", 1 / 8), ("tpu", 1 / 8)])
def test_a_reduce_scatter_stores_its_shard(platform, share):
    """Beside the product's partial sum; on CPUs all of the sum, of which a slice is kept."""
    sizes, specs = {"data": 8}, (P(None, "data"), P("data"))
    args = (jax.ShapeDtypeStruct((N, N), "float32"), FULL)

    def then_squared(x, w):
        return jnp.sin(scattered(x, w)) @ jnp.ones((N, N))

    found = temporaries(then_squared, *args, platform=platform, sizes=sizes, in_shardings=specs)
    assert found >= N * N * 4
    if share < 1:
        assert found < temporaries(then_squared, *args, platform="cpu", sizes=sizes, in_shardings=specs)


def test_what_only_products_read_takes_half_on_tpu():
    """A carry, its next value and the matrix; the product is added to the other carry in place.

    The row that comes first is stored for the concatenation, in tiles of two rows; the others are where they were.

    XLA:GPU rounds nothing, and reads the matrix where it is.
    """

    def rolled(x, w):
        def body(carry, _):
            y, total = carry
            return (jnp.roll(y, 1, 0), total + y @ w), None

        return jax.lax.scan(body, (jnp.sin(x), x), None, length=4)[0][1]

    assert temporaries(rolled, FULL, FULL, platform="tpu") == 3 * N * N * 2 + 2 * N * 2
    assert temporaries(rolled, FULL, FULL, platform="gpu") == 2 * N * N * 4


def test_a_tpu_stores_a_stack_of_what_it_rounds_in_half_the_bytes():
    """The carries of a loop, which only products read."""

    def stacked(x, w):
        def body(c, _):
            c = jnp.tanh(c @ w)
            return c, c

        return jax.lax.scan(body, x, None, length=16)[1] @ w

    full, half = (temporaries(stacked, FULL, FULL, platform=platform) for platform in ("gpu", "tpu"))
    assert 16 * N * N * 2 <= half < 16 * N * N * 4 <= full


def test_a_tpu_rounds_weights_once_for_all_steps_of_a_loop():
    def looped(x, w):
        return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=16)[0]

    x, w = jax.ShapeDtypeStruct((8, 1024), "float32"), jax.ShapeDtypeStruct((1024, 1024), "float32")
    rounded = 1024 * 1024 * 2
    assert temporaries(looped, x, w, platform="gpu") < rounded <= temporaries(looped, x, w, platform="tpu")


def softmax_of_rows(x, w):
    """Products in 16 bits whose softmax is computed in 32."""
    return jax.nn.softmax((x @ w).astype("float32")).astype("bfloat16") @ w


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_a_product_in_16_bits_is_stored_so_though_it_is_only_read_in_32(platform):
    with sharding.mesh(data=1, devices=jax.devices()[:1]):
        found = usage(sharding.jit(softmax_of_rows).complete(HALF, HALF).assignment, platform=platform)
    roots = [kernel.root for step in found.lifetimes.steps for kernel in step.kernels]
    assert max(one.itemsize for one in roots if one.shape == (N, N)) == 2


@pytest.mark.slow
@compilers.needs("libtpu")
def test_the_compiler_for_tpus_stores_it_so():
    large = jax.ShapeDtypeStruct((16 * N, 16 * N), "bfloat16")
    check_compiled_temporaries((softmax_of_rows, (large, large), 1), 2 * large.size)


def activated(x, w):
    return jnp.tanh(x @ w).astype("bfloat16") @ jnp.ones(w.shape, "bfloat16")


@pytest.mark.parametrize(("size", "stored"), [(8 * N, 2), (N, 0)])
def test_a_tpu_computes_in_the_kernel_of_a_product_what_follows_it(size, stored):
    """A product in 32 bits is never stored, only what it becomes; not even that where another one reads it fast."""
    x, w = (jax.ShapeDtypeStruct((n, size), "float32") for n in (8192, size))
    gpu, tpu = (temporaries(activated, x, w, platform=platform) for platform in ("gpu", "tpu"))
    assert tpu == 8192 * size * stored < 8192 * size * 2 + size * size * 2 <= gpu


def test_a_tpu_runs_each_update_right_after_its_gradient():
    """Two layers more take the activations of two layers more, not their gradients."""

    def step(weights, x):
        def loss(weights):
            y = x
            for w in weights:
                y = jnp.tanh(y @ w)
            return y.sum()

        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))

    def taken(layers, platform):
        x = jax.ShapeDtypeStruct((8, N), "float32")
        return temporaries(step, [FULL] * layers, x, platform=platform, donate_argnums=0)

    assert taken(8, "tpu") - taken(4, "tpu") < N * N * 4


@pytest.mark.parametrize("platform", TRAITS)
def test_every_platform_has_a_stored_error(platform):
    error = PEAK_ERRORS[platform]
    assert 0 < error.median <= error.large and error.low <= 1 <= error.high


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is None, reason="no cuda13")
@pytest.mark.parametrize(
    ("options", "sizes", "within"),
    [
        ({}, {"data": 2, "fsdp": 2, "tensor": 2}, 0.1),
        ({}, {"fsdp": 8}, 0.1),
        ({"scan": True, "remat": True}, {"data": 2, "fsdp": 2, "tensor": 2}, 0.25),  # not understood
    ],
)
def test_gpt_on_h100(options, sizes, within):
    config = {"vocab": 32000, "context": 1024, "layers": 4, "features": 1024, "mlp_features": 4096}
    step = gpt_step(rows=32, dtype="bfloat16", **config, **options)("weights", sizes)
    with sharding.mesh(sizes, devices=cost.compile_only("h100:1x8")):
        jitted = sharding.jit(step.run, in_shardings=step.specs, donate_argnums=0)
        completion = jitted.complete(*step.args)
        facts = cost.read_compiled(jitted.lower(*step.args).compile())
    assert completion.communication().lowered("gpu").by_kind() == facts.by_kind()
    assert completion.memory(platform="gpu").peak_bytes == pytest.approx(facts.peak_bytes, rel=within)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is None, reason="no cuda13")
@pytest.mark.parametrize("donated", [(), (0,)])
@pytest.mark.parametrize("rows", [2048, 8192])
def test_sums_that_nothing_overlaps_are_reduced_in_place_on_h100(donated, rows):
    """An all-reduce with no other work to hide behind is synchronous, in the buffer of a result that is not donated."""

    def update(w, x):
        return w - 0.01 * jax.grad(lambda w: ((x @ w) ** 2).mean())(w)

    w, x = jax.ShapeDtypeStruct((4096, 4096), jnp.float32), jax.ShapeDtypeStruct((rows, 4096), jnp.float32)
    with sharding.mesh(data=8, devices=cost.compile_only("h100:1x8")):
        jitted = sharding.jit(update, in_shardings=(P(), P("data")), donate_argnums=donated)
        predicted = jitted.complete(w, x).memory(platform="gpu").peak_bytes
        compiled = cost.read_compiled(jitted.lower(w, x).compile()).peak_bytes
    assert predicted == pytest.approx(compiled, rel=0.1)


def sum_of_product(rows):
    """A product over a sharded dim, whose sum is all-reduced, and its arguments with specs: rows of any shape."""

    def f(x, w, v):
        return jnp.sin(x @ w) @ v

    x = jax.ShapeDtypeStruct((*rows, 1024), jnp.float32)
    w, v = jax.ShapeDtypeStruct((1024, 4096), jnp.float32), jax.ShapeDtypeStruct((4096, 256), jnp.float32)
    return sharding.jit(f, in_shardings=(P(*[None] * len(rows), "tensor"), P("tensor"), P())), (x, w, v)


@pytest.mark.parametrize(("devices", "more_arrays"), [("h100:1x8", 1), ("v5p:2x2x2", 0)])
def test_a_sum_of_more_dims_than_a_matrix_has_is_not_reduced_in_place_on_gpus(devices, more_arrays):
    """XLA:GPU multiplies matrices; such a sum reads a bitcast of the product, not the product itself."""
    peaks = []
    for rows in ((16384,), (16, 1024)):
        f, args = sum_of_product(rows)
        with sharding.mesh(tensor=8, devices=devices):
            peaks.append(f.complete(*args).memory().peak_bytes)
    assert peaks[1] - peaks[0] == more_arrays * 4 * 16384 * 4096


@pytest.mark.slow
@pytest.mark.parametrize("rows", [(16384,), (16, 1024), (4, 4, 1024)])
@pytest.mark.parametrize(("platform", "described"), [COMPILERS["tpu"], COMPILERS["gpu"]])
def test_the_peak_of_a_reduced_product(platform, described, rows):
    f, args = sum_of_product(rows)
    with sharding.mesh(tensor=8, devices=cost.compile_only(described)):
        predicted = f.complete(*args).memory(platform=platform).peak_bytes
        compiled = cost.read_compiled(f.lower(*args).compile()).peak_bytes
    assert predicted == pytest.approx(compiled, rel=0.01)


def small_layers(batch):
    """A step whose gradients are one combined all-reduce, of 25 MB."""

    def step(params, x):
        def loss(params):
            y = x
            for w, v in params:
                y = y + jnp.tanh(y @ w) @ v
            return jnp.square(y).mean()

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

    w = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    args = [(w, w)] * 3, jax.ShapeDtypeStruct((*batch, 1024), jnp.float32)
    return sharding.jit(step, in_shardings=(P(), P("data")), donate_argnums=0), args


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is None, reason="no cuda13")
@pytest.mark.parametrize("batch", [(1024,), (4096,), (8, 512)])
def test_combined_sums_are_copied_into_one_buffer_on_h100(batch):
    step, args = small_layers(batch)
    with sharding.mesh(data=8, devices=cost.compile_only("h100:1x8")):
        predicted = step.complete(*args).memory(platform="gpu").peak_bytes
        compiled = cost.read_compiled(step.lower(*args).compile()).peak_bytes
    assert predicted == pytest.approx(compiled, rel=0.1)


def test_combined_sums_are_copied_into_one_buffer():
    """With few activations the peak has parameters, their gradients, and the buffer that these are copied to."""
    step, args = small_layers((1024,))
    with sharding.mesh(data=8, devices="h100:1x8"):
        peak = step.complete(*args).memory().peak_bytes
    gradients = 6 * 4 * 1024**2
    assert 3 * gradients <= peak < 3.2 * gradients
