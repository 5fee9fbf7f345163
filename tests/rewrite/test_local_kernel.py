"""Pallas kernels on shards: equal to one device, with no collective but those of the rule."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import pallas_kernels
from support.one_device import SIZES, check

import sharding
from sharding import P, cost, kernels, rules

RNG = np.random.default_rng(0)


def array(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


X, W = array(16, 32), array(32, 16)
LONG_Q = array(4, 8, 32, 4)
Q, K, V = array(4, 8, 16, 4), array(4, 4, 12, 4), array(4, 4, 12, 4)
IDS, TABLE = RNG.integers(0, 8, 8).astype(np.int32), array(8, 16)


@pytest.fixture(autouse=True)
def registered():
    for name, (rule, options) in pallas_kernels.RULES.items():
        rules.register("pallas_call", rule, kernel=name, **options)
    yield
    for name in pallas_kernels.RULES:
        rules.unregister("pallas_call", kernel=name)


@pytest.mark.parametrize(
    "specs, expected, result",
    [
        ((P("data"), P(None, "tensor")), {}, P("data", "tensor")),
        ((P("data", "tensor"), P("tensor")), {"all-reduce": 1}, P("data")),  # each device sums its part
        ((P(None, ("data", "tensor")), P(("data", "tensor"))), {"all-reduce": 1}, P()),
        ((P("tensor"), P("tensor")), {"all-gather": 1}, P("tensor")),
    ],
    ids=str,
)
def test_a_product_is_split_along_rows_columns_and_sums(specs, expected, result):
    assert check(pallas_kernels.matmul, (X, W), specs, expected).sharding.spec == result


@pytest.mark.parametrize(
    "specs, expected",
    [
        ((P("data", "tensor"), P("data", "tensor"), P("data", "tensor")), {}),
        ((P("data", None, "tensor"), P("data"), P("data")), {}),  # the mask has rows of the whole array
        ((P(None, ("data", "tensor")), P(), P()), {"all-gather": 2}),  # 4 heads of keys and values
    ],
    ids=str,
)
def test_attention_is_split_along_batch_grouped_heads_and_queries(specs, expected):
    check(pallas_kernels.attention, (Q, K, V), specs, expected)


def test_masks_follow_the_position_of_each_block_of_a_device():
    """Queries of a device are two blocks, whose ids in the whole grid the mask is computed from."""
    check(pallas_kernels.attention, (LONG_Q, K, V), (P("data", None, "tensor"), P("data"), P("data")), {})


def test_blocks_found_by_data_are_whole_along_that_dim_only():
    assert check(pallas_kernels.lookup, (IDS, TABLE), (P(), P(None, "tensor")), {}).sharding.spec == P(None, "tensor")
    check(pallas_kernels.lookup, (IDS, TABLE), (P("data"), P("data")), {"all-gather": 2})


def test_a_mapped_kernel_has_a_grid_axis_more():
    rules.register("pallas_call", "b m k, k n -> b m n", kernel="matmul")
    stacked = array(4, 16, 32)
    mapped = jax.vmap(pallas_kernels.matmul, in_axes=(0, None))
    check(mapped, (stacked, W), (P("data", None, "tensor"), P("tensor")), {"all-reduce": 1})
    check(mapped, (stacked, W), (P("tensor", "data"), P()), {})


@jax.custom_vjp
def product(x, w):
    return pallas_kernels.matmul(x, w)


product.defvjp(
    lambda x, w: (product(x, w), (x, w)),
    lambda saved, ct: (pallas_kernels.matmul(ct, saved[1].T), pallas_kernels.matmul(saved[0].T, ct)),
)


@pytest.mark.parametrize("remat", [False, True])
def test_kernels_in_layers_and_their_derivatives(remat):
    def layer(x, ws):
        x = jnp.sin(product(product(x, ws[0]), ws[1]))
        return x, None

    def loss(ws, x):
        return (jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, ws)[0] ** 2).mean()

    ws = 0.1 * array(3, 16, 32), 0.1 * array(3, 32, 16)
    args, specs = (ws, array(16, 16)), ((P(None, None, "tensor"), P(None, "tensor")), P("data"))
    with sharding.mesh(SIZES):
        step = sharding.jit(jax.value_and_grad(loss), in_shardings=specs)
        found, gathers = step(*args), step.complete(*args).communication().lowered("cpu").by_kind()
        compiled = cost.read_compiled(step.lower(*args).compile()).by_kind()
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(jax.jit(jax.value_and_grad(loss))(*args)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert gathers == compiled and gathers.keys() == {"all-reduce"}


def test_a_kernel_without_a_rule_runs_on_whole_arrays():
    rules.unregister("pallas_call", kernel="scaled")
    with sharding.mesh(SIZES):
        step = sharding.jit(pallas_kernels.scaled, in_shardings=P("data"))
        np.testing.assert_array_equal(step(X), 2 * X)
        assert [one.op for one in step.complete(X).unknown] == ["pallas_call"]
        assert step.complete(X).communication().by_kind().keys() == {"all-gather"}


@pytest.mark.parametrize(
    "layer",
    [lambda x, w: jnp.tanh(pallas_kernels.matmul(x, w)), kernels.with_rule(jnp.matmul, "m k, k n -> m n")],
    ids=["pallas_call", "with_rule"],
)
def test_in_the_stages_of_a_pipeline(layer):
    """Along its axis the program is manual; along others each device runs the kernel on its shards."""

    def stage(x, w):
        return jax.lax.ppermute(layer(layer(x, w[0]), w[0].T), "pipe", [(0, 1), (1, 0)])[None]

    def stages(x, w):
        in_specs = (P(), P("pipe"))
        return jax.shard_map(stage, axis_names={"pipe"}, in_specs=in_specs, out_specs=P("pipe"), check_vma=False)(x, w)

    w, sizes = np.stack([W, 2 * W]), {"pipe": 2, "data": 2, "tensor": 2}
    with sharding.mesh(sizes):
        step = sharding.jit(
            stages, in_shardings=(P("data"), P("pipe", None, "tensor")), out_shardings=P("pipe", "data")
        )
        completion, found = step.complete(X, w), step(X, w)
        compiled = cost.read_compiled(step.lower(X, w).compile()).by_kind()
    expected = [jax.jit(lambda x, w: layer(layer(x, w), w.T))(X, w[k]) for k in (1, 0)]
    np.testing.assert_allclose(found, np.stack(expected), rtol=2e-4, atol=2e-4)
    predicted = completion.communication().lowered("cpu").by_kind()
    assert predicted == compiled
    assert {str(kind): count for kind, (count, _) in compiled.items()} == {"all-reduce": 1, "collective-permute": 1}


@pytest.mark.parametrize("check_vma", [False, True])
def test_results_differ_along_manual_axes_as_operands_do(check_vma):
    layer = kernels.with_rule(jnp.matmul, "m k, k n -> m n")

    def stage(x, w):
        return jax.lax.psum(layer(x, w) @ w.T, "pipe")

    f = jax.shard_map(stage, axis_names={"pipe"}, in_specs=(P("pipe"), P()), out_specs=P(), check_vma=check_vma)
    with sharding.mesh({"pipe": 2, "data": 2, "tensor": 2}):
        found = sharding.jit(jax.grad(lambda x, w: (f(x, w) ** 2).sum()), in_shardings=(P(("pipe", "data")), P()))(X, W)
    expected = jax.grad(lambda x, w: ((x[:8] @ w @ w.T + x[8:] @ w @ w.T) ** 2).sum())(X, W)
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-3)
