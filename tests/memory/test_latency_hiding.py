"""The order of kernels on GPUs: by hand, as laws of random programs, and against XLA:GPU ahead of time."""

import importlib.util
import random

import jax
import jax.numpy as jnp
import pytest

import sharding
from sharding import P, cost
from sharding.memory import gpu_latencies
from sharding.memory.fusion import Kernel
from sharding.memory.instruction import Body, Instruction
from sharding.memory.kernel_order import program_order
from sharding.memory.latency_hiding import xla_gpu_order
from sharding.memory.liveness import lifetimes
from sharding.memory.sibling_fusion import fuse_siblings

MEGABYTES = 2**20


def kernel(name, *operands, role="unfusible", size=8 * MEGABYTES, group=None):
    one = Instruction(name, role, [k.root for k in operands], (size // 4,), size, group=group)
    return Kernel(one, [one], list(one.operands))


def names(steps):
    return [" ".join(k.root.name for k in step.kernels) for step in steps]


def test_other_kernels_run_while_a_collective_is_in_flight():
    x = kernel("x")
    before, other = kernel("before", x), kernel("other", x)
    reduced = kernel("all-reduce", before)
    end = kernel("end", other, reduced)
    steps = xla_gpu_order([x, other, before, reduced, end], [end.root])
    assert names(steps) == ["x", "before", "all-reduce", "other", "end"]
    assert [step.is_in_place for step in steps] == [False, False, True, False, False]


def test_a_collective_with_nothing_beside_it_has_a_result_of_its_own():
    x = kernel("x")
    reduced = kernel("all-reduce", x)
    end = kernel("end", reduced)
    steps = xla_gpu_order([x, reduced, end], [end.root])
    assert names(steps) == ["x", "all-reduce", "end"]
    assert not any(step.is_in_place for step in steps)
    assert x.root in steps[-1].operands  # it lives until the collective has ended


def test_one_collective_is_in_flight_at_a_time():
    x = kernel("x")
    gathers = [kernel("all-gather", x) for _ in range(3)]
    end = kernel("end", *gathers)
    assert names(xla_gpu_order([x, *gathers, end], [end.root])) == ["x", *["all-gather"] * 3, "end"]


def test_small_collectives_of_one_group_are_combined_and_large_ones_are_not():
    x = kernel("x")
    small = [kernel("all-reduce", x, size=MEGABYTES, group="data") for _ in range(3)]
    large = [kernel("all-reduce", x, size=64 * MEGABYTES, group="data") for _ in range(2)]
    end = kernel("end", *small, *large)
    sizes = sorted(len(step.kernels) for step in xla_gpu_order([x, *small, *large, end], [end.root]))
    assert sizes == [1, 1, 1, 1, 3]


def test_kernels_that_read_the_same_array_are_one_unless_one_depends_on_another():
    x = kernel("x")
    a, b = kernel("a", x, role="fusible"), kernel("b", x, role="fusible")
    c = kernel("c", x, a, role="fusible")
    units = fuse_siblings([[k] for k in (x, a, b, c)])
    assert [[k.root.name for k in unit] for unit in units] == [["x"], ["a", "b"], ["c"]]


@pytest.mark.parametrize("seed", range(30))
def test_a_random_program_runs_every_kernel_once_after_its_operands(seed):
    r = random.Random(seed)
    kernels = [kernel("x")]
    for k in range(60):
        operands = r.sample(kernels, min(len(kernels), r.randint(1, 3)))
        name = r.choice(["all-reduce", "all-gather", "reduce-scatter", "all-to-all", f"k{k}", f"k{k}", f"k{k}"])
        role = "unfusible" if name in gpu_latencies.COLLECTIVES else r.choice(["fusible", "unfusible"])
        group = r.choice([None, "data", "model"]) if name in ("all-reduce", "all-gather") else None
        size = r.choice([1, 8, 40]) * MEGABYTES
        kernels.append(kernel(name, *operands, role=role, size=size, group=group and (name, group)))
    end = kernel("end", *kernels[-5:])
    written = [*kernels, end]
    steps = xla_gpu_order(written, [end.root])
    assert {id(k) for step in steps for k in step.kernels} == {id(k) for k in written}
    assert sum(len(step.kernels) for step in steps) == len(written)
    done = set()
    for step in steps:
        assert {x for k in step.kernels for x in k.operands} <= done
        done |= {k.root for k in step.kernels}
    body = Body([k.root for k in written], [], [end.root])
    least = lifetimes(body, [], set(), program_order).peak_bytes()
    assert lifetimes(body, [], set(), xla_gpu_order).peak_bytes() >= max(k.root.num_bytes for k in written)
    assert least > 0


LOGGED = [
    # Batch, rows, columns, contracted elements, bytes per operand element and result element, microseconds.
    ((1, 16384, 2048, 1024, 2, 2), 113.7),
    ((1, 16384, 1024, 512, 2, 2), 48.4),
    ((1, 8192, 8192, 2048, 2, 2), 373.7),
    ((64, 1024, 1024, 128, 2, 2), 79.2),
    ((64, 128, 1024, 1024, 2, 2), 71.2),
    ((64, 1024, 1024, 128, 2, 4), 2744.3),
]


@pytest.mark.parametrize(("sizes", "microseconds"), LOGGED)
def test_times_of_products_are_near_those_in_the_log_of_xla(sizes, microseconds):
    b, m, n, k, operand, result = sizes
    lhs, rhs = (
        Instruction("argument", "argument", [], shape, operand * b * shape[1] * shape[2])
        for shape in ((b, m, k), (b, k, n))
    )
    eqn = jax.make_jaxpr(lambda x, y: jax.lax.dot_general(x, y, (((2,), (1,)), ((0,), (0,)))))(
        *(jax.ShapeDtypeStruct(x.shape, "bfloat16") for x in (lhs, rhs))
    ).eqns[0]
    made = Instruction("dot_general", "unfusible", [lhs, rhs], (b, m, n), result * b * m * n, eqn=eqn)
    assert gpu_latencies.product_us(made) == pytest.approx(microseconds, rel=0.25)


@pytest.mark.parametrize(
    ("sizes", "splits"), [((1024, 1536, 16384), 2), ((512, 1024, 16384), 4), ((1024, 2048, 16384), 1)]
)
def test_products_are_split_as_compiled(sizes, splits):
    """The gradients of a model's weights, as an H100 program has them."""
    assert gpu_latencies.num_splits(1, *sizes, 2, 2, 2) == splits


def unrolled(layers, features):
    """A step of recomputed layers, with weights over both axes."""

    @jax.checkpoint
    def block(w, x):
        w = jax.tree.map(lambda a: a.astype("bfloat16"), w)
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"]

    def loss(weights, x):
        x = x.astype("bfloat16")
        for w in weights:
            x = block(w, x)
        return jnp.mean(x.astype("float32") ** 2)

    def step(weights, x):
        return jax.tree.map(lambda a, b: a - 0.1 * b, weights, jax.grad(loss)(weights, x))

    up, down = (features, 4 * features), (4 * features, features)
    weights = {"up": jax.ShapeDtypeStruct(up, "float32"), "down": jax.ShapeDtypeStruct(down, "float32")}
    specs = {"up": P("data", "model"), "down": P("model", "data")}
    return step, [weights] * layers, [specs] * layers


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is None, reason="no cuda13")
@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="XLA of JAX 0.10.2 schedules differently")
def test_the_scheduler_delays_the_gradients_of_unrolled_layers():
    """A third of what an H100 program holds is there to hide latencies."""
    step, weights, specs = unrolled(layers=8, features=1024)
    x = jax.ShapeDtypeStruct((32, 512, 1024), "float32")
    with sharding.mesh({"data": 2, "model": 4}, devices=cost.compile_only("h100:1x8")):
        jitted = sharding.jit(step, in_shardings=(specs, P("data")), donate_argnums=0)
        found = jitted.complete(weights, x)
        compiled = cost.read_compiled(jitted.lower(weights, x).compile()).peak_bytes
    assert found.memory(platform="gpu").peak_bytes == pytest.approx(compiled, rel=0.15)
    assert found.memory(platform="tpu").peak_bytes < 0.7 * compiled  # in program order
