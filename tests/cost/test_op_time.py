"""FLOPs and bytes of ops against hand counts, and against XLA's cost analysis."""

import math

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from sharding import compat, kernels
from sharding.cost import op_seconds, work
from sharding.cost.op_time import LISTED
from sharding.graph import CALLS
from sharding.hardware import CHIPS
from sharding.rules.rule_table import RULES


def works(fn, *args):
    """The work of each equation of a function, calls inlined."""

    def walk(jaxpr):
        for eqn in compat.open_jaxpr(jaxpr).eqns:
            inner = [j for _, _, j in compat.sub_jaxprs(eqn.params)] if eqn.primitive.name in CALLS else []
            for one in inner:
                yield from walk(one)
            if not inner:
                operands, results = ([v.aval for v in vs] for vs in (eqn.invars, eqn.outvars))
                yield eqn.primitive.name, work(eqn.primitive.name, operands, results, eqn.params)

    return list(walk(jax.make_jaxpr(fn)(*args)))


def only(fn, *args):
    """The work of a function's only op with any."""
    found = [done for _, done in works(fn, *args) if done.flops or done.num_bytes]
    assert len(found) == 1
    return found[0]


def f32(*shape):
    return jnp.zeros(shape, jnp.float32)


def test_matmul():
    done = only(jnp.matmul, f32(8, 16), f32(16, 32))
    assert (done.flops, done.read_bytes, done.written_bytes) == (2 * 8 * 16 * 32, 4 * (8 * 16 + 16 * 32), 4 * 8 * 32)
    assert (done.matmul_dtype, done.precision) == ("float32", "default")


def test_batched_and_transposed_matmul():
    done = only(lambda q, k: jnp.einsum("blhd,bmhd->bhlm", q, k), f32(2, 8, 4, 16), f32(2, 12, 4, 16))
    assert done.flops == 2 * (2 * 4) * 8 * 12 * 16


def test_local_shapes_count():
    """A global equation with local shapes."""
    eqn = jax.make_jaxpr(jnp.matmul)(f32(64, 128), f32(128, 32)).eqns[0]
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8, 64), (64, 16), (8, 16))]
    done = work("dot_general", shapes[:2], shapes[2:], eqn.params)
    assert (done.flops, done.matmul_dtype) == (2 * 8 * 64 * 16, "bfloat16")


@pytest.mark.parametrize("asked", ["default", "high", "highest"])
def test_precision(asked):
    assert only(lambda a, b: jnp.matmul(a, b, precision=asked), f32(2, 2), f32(2, 2)).precision == asked


def test_convolution():
    conv = jax.lax.conv_general_dilated
    numbers = ("NHWC", "HWIO", "NHWC")
    done = only(lambda x, k: conv(x, k, (1, 1), "SAME", dimension_numbers=numbers), f32(2, 8, 8, 4), f32(3, 3, 4, 16))
    assert done.flops == 2 * (2 * 8 * 8 * 16) * (3 * 3 * 4)
    depthwise = only(
        lambda x, k: conv(x, k, (2, 2), "VALID", dimension_numbers=numbers, feature_group_count=4),
        f32(2, 9, 9, 4),
        f32(3, 3, 1, 8),
    )
    assert depthwise.flops == 2 * (2 * 4 * 4 * 8) * (3 * 3)


def test_ragged_matmul():
    done = only(jax.lax.ragged_dot, f32(10, 16), f32(3, 16, 32), jnp.array([2, 5, 3], jnp.int32))
    assert done.flops == 2 * 10 * 16 * 32
    sizes = jnp.array([2, 5, 3], jnp.int32)
    backwards = works(jax.grad(lambda w: jax.lax.ragged_dot(jnp.ones((10, 16)), w, sizes).sum()), f32(3, 16, 32))
    assert [one.flops for name, one in backwards if name == "ragged_dot_general"][-1] == 2 * 10 * 16 * 32


@pytest.mark.parametrize(
    ("name", "fn", "args", "flops"),
    [
        ("add", jax.lax.add, (f32(8, 4), f32(8, 4)), 32),
        ("exp", jax.lax.exp, (f32(8, 4),), 320),
        ("reduce_sum", lambda x: jax.lax.reduce_sum_p.bind(x, axes=(0,), out_sharding=None), (f32(8, 4),), 32),
        ("cumsum", lambda x: jax.lax.cumsum(x, axis=0), (f32(8, 4),), 32),
        (
            "reduce_window_sum",
            lambda x: jax.lax.reduce_window(x, 0.0, jax.lax.add, (2, 2), (2, 2), "VALID"),
            (f32(8, 4),),
            8 * 4,
        ),
        ("sort", lambda x: jax.lax.sort(x, dimension=1), (f32(3, 16),), 3 * 16 * 4),
        ("top_k", lambda x: jax.lax.top_k(x, 4), (f32(3, 16),), 3 * 16 * 2),
        ("fft", lambda x: jax.lax.fft(x, "fft", (16,)), (jnp.zeros((3, 16), jnp.complex64),), 3 * 5 * 16 * 4),
        ("fft", lambda x: jax.lax.fft(x, "rfft", (16,)), (f32(3, 16),), 3 * 5 * 16 * 4 / 2),
        ("cholesky", lambda x: jax.lax.linalg.cholesky(x, symmetrize_input=False), (f32(2, 6, 6),), 2 * 6**3 / 3),
        ("lu", jax.lax.linalg.lu, (f32(6, 6),), 2 * 6**3 / 3),
        ("eigh", jax.lax.linalg.eigh, (f32(6, 6),), 9 * 6**3),
        (
            "triangular_solve",
            lambda a, b: jax.lax.linalg.triangular_solve(a, b, left_side=True),
            (f32(6, 6), f32(6, 5)),
            6 * 6 * 5,
        ),
    ],
)
def test_hand_counts(name, fn, args, flops):
    assert math.isclose(sum(done.flops for found, done in works(fn, *args) if found == name), flops)


def test_scatter_and_gather_access_selected_elements():
    table, rows = f32(1000, 8), jnp.array([[1], [5]], jnp.int32)
    looked_up = next(done for name, done in works(lambda t, i: t[i[:, 0]], table, rows) if name == "gather")
    assert (looked_up.flops, looked_up.read_bytes, looked_up.written_bytes) == (0, 2 * 8 * 4 + 2 * 4, 2 * 8 * 4)
    added = next(done for name, done in works(lambda t, u: t.at[1].add(u), table, f32(8)) if name == "scatter-add")
    assert (added.flops, added.written_bytes) == (8, 8 * 4)
    assert added.read_bytes == 2 * 8 * 4 + 4
    update = jax.lax.dynamic_update_slice_in_dim
    put = next(
        done
        for name, done in works(lambda t, u: update(t, u, 3, 0), table, f32(1, 8))
        if name == "dynamic_update_slice"
    )
    assert put.written_bytes == 8 * 4
    assert put.read_bytes < 100


def test_data_movement():
    turned = only(jnp.transpose, f32(8, 4))
    assert (turned.flops, turned.read_bytes, turned.written_bytes) == (0, 128, 128)
    assert all(not done.num_bytes for _, done in works(lambda x: x.reshape(4, 8), f32(8, 4)))
    made = only(lambda: jax.lax.iota(jnp.float32, 8))
    assert (made.read_bytes, made.written_bytes) == (0, 32)
    cast = only(lambda x: x.astype(jnp.bfloat16), f32(8, 4))
    assert (cast.read_bytes, cast.written_bytes) == (128, 64)


def test_random_keys_have_a_size():
    assert all(done.flops >= 0 for _, done in works(lambda k: jax.random.normal(k, (8,)), jax.random.key(0)))


def test_an_unknown_primitive_counts_its_elements():
    done = work("mystery", [f32(8, 4)], [f32(4)], {})
    assert (done.flops, done.read_bytes, done.written_bytes) == (32, 128, 16)


def test_every_primitive_with_a_rule_has_an_explicit_count():
    kernels = {"dot_product_attention_bwd_wrapper", "dot_product_attention_fwd_wrapper", "kernel_call"}
    assert not RULES.keys() - LISTED - {"custom_partitioning", "scaled_matmul_wrapper"} - kernels


def rows_plus_one(x, cost_estimate=None):
    def body(x_ref, out_ref):
        out_ref[...] = x_ref[...] + 1.0

    spec = pl.BlockSpec((2, 8), lambda i: (i, 0))
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(
        body, grid=(x.shape[0] // 2,), in_specs=[spec], out_specs=spec, out_shape=shape, cost_estimate=cost_estimate
    )(x)


def test_a_pallas_kernel_does_its_body_once_per_program_or_what_its_estimate_says():
    x = jnp.ones((10, 8))
    ((_, done),) = works(rows_plus_one, x)
    assert (done.flops, done.num_bytes, done.matmul_dtype) == (80, 640, None)
    estimate = pl.CostEstimate(flops=7, transcendentals=3, bytes_accessed=0)
    ((_, done),) = works(lambda x: rows_plus_one(x, estimate), x)
    assert done.flops == 7 + 3 * 10


@pytest.mark.skipif(not compat.HAS_MOSAIC_GPU, reason="JAX 0.11 has today's GPU kernels")
def test_copies_of_a_gpu_kernel_are_no_arithmetic():
    def body(x_ref, out_ref):
        def copied(block, barrier):
            plgpu.copy_gmem_to_smem(x_ref, block, barrier)
            plgpu.barrier_wait(barrier)
            out_ref[...] = block[...] + 1.0

        pl.run_scoped(copied, plgpu.SMEM((128,), jnp.float32), plgpu.Barrier())

    run = plgpu.kernel(body, out_type=f32(128), grid=(3,), grid_names=("program",))
    ((_, done),) = works(run, jnp.ones(128))
    assert done.flops == 3 * 128


def test_a_function_on_shards_does_what_its_equations_do():
    def chunked(x, w):
        return jax.lax.scan(lambda _, row: (None, jax.lax.cond(row[0] > 0, jnp.sin, jnp.abs, row @ w)), None, x)[1]

    ((_, done),) = works(kernels.with_rule(chunked, "m k, k n -> m n"), jnp.ones((3, 4)), jnp.ones((4, 5)))
    assert done.flops == pytest.approx(3 * (2 * 4 * 5 + 16 * 5), rel=0.1)
    assert done.matmul_dtype == "float32"


def compiled_flops(fn, *args):
    return jax.jit(fn).lower(*args).compile().cost_analysis()["flops"]


@pytest.mark.parametrize(
    ("spec", "shapes"),
    [("ij,jk->ik", ((8, 16), (16, 32))), ("bij,bkj->bik", ((3, 8, 16), (3, 4, 16))), ("ij,ij->", ((8, 16), (8, 16)))],
)
def test_matmul_flops_equal_xlas(spec, shapes):
    def product(a, b):
        return jnp.einsum(spec, a, b)

    args = [f32(*shape) for shape in shapes]
    flops = sum(done.flops for name, done in works(product, *args) if name == "dot_general")
    assert flops == pytest.approx(compiled_flops(product, *args), rel=0.05 if spec.endswith(">") else 0)


def test_convolution_flops_are_near_xlas():
    """XLA omits the positions over the padding."""
    for padding, least in (("VALID", 1.0), ("SAME", 0.85)):

        def conv(x, k, padding=padding):
            return jax.lax.conv_general_dilated(x, k, (1, 1), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))

        args = (f32(2, 16, 16, 4), f32(3, 3, 4, 8))
        counted = sum(done.flops for _, done in works(conv, *args))
        assert least * counted <= compiled_flops(conv, *args) <= counted


def test_a_network_is_about_what_xla_counts():
    def loss(w1, w2, x):
        return jnp.mean((jnp.tanh(x @ w1) @ w2) ** 2)

    step = jax.value_and_grad(loss, argnums=(0, 1))
    args = (f32(64, 256), f32(256, 64), f32(32, 64))
    counted = sum(done.flops for _, done in works(step, *args))
    assert counted == pytest.approx(compiled_flops(step, *args), rel=0.1)


def test_seconds_are_those_of_the_roofline():
    chip = CHIPS["h100"]
    large = only(jnp.matmul, *[jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16)] * 2)
    assert math.isclose(op_seconds(large, chip), 2 * 8192**3 / (chip.matmul_share * 989.4e12) + chip.op_seconds)
    small = only(jax.lax.add, *[jax.ShapeDtypeStruct((1 << 20,), jnp.float32)] * 2)
    assert math.isclose(op_seconds(small, chip), 3 * 4 * 2**20 / (chip.memory_share * 3.35e12) + chip.op_seconds)
    exact = only(
        lambda a, b: jnp.matmul(a, b, precision="highest"), *[jax.ShapeDtypeStruct((4096, 4096), "float32")] * 2
    )
    assert math.isclose(op_seconds(exact, CHIPS["v5p"]), 2 * 4096**3 / (459e12 / 6) + 1e-6)
    renamed = next(done for _, done in works(lambda x: x.reshape(4, 8), f32(8, 4)))
    assert op_seconds(renamed, chip) == 0


MATMUL = kernels.with_rule(jnp.matmul, "... k, k n -> ... n")
GROUPED = kernels.with_rule(
    lambda x, w: jnp.einsum("bgd,gdf->bgf", x.reshape(len(x), *w.shape[:2]), w), "b (g d), g d f -> b g f"
)


@pytest.mark.parametrize(
    ("kernel", "function", "whole", "local"),
    [
        (MATMUL, jnp.matmul, [(2, 64, 32), (32, 16)], [(1, 16, 8), (8, 4)]),
        (MATMUL, jnp.matmul, [(64, 32), (32, 16)], [(64, 32), (32, 0)]),
        (GROUPED, None, [(8, 64), (4, 16, 32)], [(2, 16), (2, 8, 16)]),
    ],
)
def test_shards_have_their_share_of_the_work_of_a_kernel(kernel, function, whole, local):
    """A kernel is traced at the shapes that it is called with, and not for each shape of a shard."""
    (eqn,) = jax.make_jaxpr(kernel)(*(f32(*shape) for shape in whole)).eqns
    parts = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in local]
    traced = len(eqn.params["call"].jaxprs)
    done = work("kernel_call", parts, [], eqn.params)
    rows, summed, columns = (parts[0].size // local[1][0], *local[1]) if function else (2 * 2, *local[1][1:])
    assert done.flops == 2 * rows * summed * columns
    assert done.matmul_dtype == "float32"
    assert len(eqn.params["call"].jaxprs) == traced
