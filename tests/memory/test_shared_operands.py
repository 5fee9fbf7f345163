"""Products that XLA:GPU merges, and those that accelerators compute as reductions."""

import jax
import jax.numpy as jnp
import pytest

import sharding
from sharding import P
from sharding.memory import usage
from sharding.memory.compiler_traits import TRAITS
from sharding.memory.device_program import lower
from sharding.memory.fusion import fuse

N = 256


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


def completed(f, *args):
    with sharding.mesh({"data": 8}):
        return sharding.jit(f, in_shardings=(P("data"), *[None] * (len(args) - 1))).complete(*args)


def products(f, *args, platform):
    body = lower(completed(f, *args).assignment, TRAITS[platform]).body
    return [one for one in body.live_instructions() if one.name == "dot_general"]


def queries_keys_values(x, q, k, v):
    return jnp.tanh(x @ q) + jnp.sin(x @ k) + jnp.cos(x @ v)


def chain(x, q, k, v):
    return x @ q @ k @ v


ARGS = floats(8 * N, N), floats(N, N), floats(N, N), floats(N, N)


def test_products_of_one_array_are_one_on_gpus_only():
    (one,) = products(queries_keys_values, *ARGS, platform="gpu")
    assert one.num_bytes == 3 * N * N * 4
    assert len(products(queries_keys_values, *ARGS, platform="tpu")) == 3
    assert len(products(chain, *ARGS, platform="gpu")) == 3


def test_loop_bodies_are_merged_too():
    def scanned(x, q, k, v):
        return jax.lax.scan(lambda c, _: (queries_keys_values(c, q, k, v), None), x, None, length=3)[0]

    body = lower(completed(scanned, *ARGS).assignment, TRAITS["gpu"]).body
    (inner,) = [inner for one in body.live_instructions() for inner in one.bodies]
    assert [one.name for one in inner.live_instructions()].count("dot_general") == 1


@pytest.mark.parametrize(("platform", "count"), [("cpu", 1), ("gpu", 0), ("tpu", 0)])
def test_a_matrix_times_a_vector_is_a_reduction_on_accelerators(platform, count):
    def weighted(x, w):
        return jnp.tanh(x @ w)

    assert len(products(weighted, floats(8 * N, N), floats(N), platform=platform)) == count


def test_a_tpu_computes_an_activation_in_the_products_that_read_it():
    def loss(x, up, down):
        return jnp.mean((jax.nn.gelu(x @ up) @ down) ** 2)

    args = floats(8 * N, N), floats(N, 4 * N), floats(4 * N, N)
    computed = {}
    for platform in ("gpu", "tpu"):
        body = lower(completed(jax.grad(loss, argnums=(1, 2)), *args).assignment, TRAITS[platform]).body
        kernels = [k for k in fuse(body.live_instructions(), body.results) if k.root.name == "dot_general"]
        computed[platform] = [sum(m.name == "tanh" for m in k.members) for k in kernels]
    assert sum(computed["gpu"]) == 0
    assert sum(computed["tpu"]) >= 2  # the next product and the gradient of its weights


def test_what_a_tpu_heap_wastes_counts_twice_and_stacks_only_until_a_loop_fills_them():
    def stacked(x, w):
        _, y = jax.lax.scan(lambda c, _: ((c := jnp.tanh(c @ w)), c), x, None, length=8)
        return jnp.mean(y)

    def plain(x, w):
        return jnp.mean(jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=8)[0])

    args = floats(8 * N, N), floats(N, N)
    for f in (stacked, plain):
        found = usage(completed(f, *args).assignment, platform="tpu")
        assert found.temporary_bytes >= found.lifetimes.peak_bytes()
        without = found.lifetimes.peak_bytes_without_stacks()
        assert (without < found.lifetimes.peak_bytes()) == (f is stacked)


@pytest.mark.parametrize(("platform", "arrays"), [("tpu", 1), ("gpu", 2)])
def test_an_all_reduce_that_nothing_overlaps_is_in_place_on_tpus(platform, arrays):
    def summed(x, w):
        return jnp.sort(jnp.sort(x, axis=0) @ w, axis=0)

    x, w = floats(8, 8 * N), floats(8 * N, 64 * N)
    with sharding.mesh({"model": 8}):
        found = sharding.jit(summed, in_shardings=(P(None, "model"), P("model"))).complete(x, w)
    peak = usage(found.assignment, platform=platform).lifetimes.peak_bytes()
    assert arrays * 8 * 64 * N * 4 <= peak < (arrays + 1) * 8 * 64 * N * 4
