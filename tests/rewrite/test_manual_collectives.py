"""Collectives along a manual axis, beside automatic ones: on shards, with the bytes of the ledger."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import compilers

import sharding
from sharding import P

SIZES = {"data": 2, "tensor": 4}

PROGRAMS = {
    "gather and scatter": lambda x, w: jax.lax.psum_scatter(
        jnp.tanh(jax.lax.all_gather(x, "tensor", axis=1, tiled=True) @ w), "tensor", scatter_dimension=1, tiled=True
    ),
    "stacked": lambda x, w: jax.lax.psum_scatter(
        jnp.tanh(jax.lax.all_gather(x, "tensor", axis=1)) @ w, "tensor", scatter_dimension=1
    ),
    "all to all": lambda x, w: jax.lax.all_to_all(jnp.tanh(x @ w), "tensor", split_axis=2, concat_axis=1, tiled=True),
}


def step(name):
    specs = P(None, "tensor"), P()
    f = jax.shard_map(
        PROGRAMS[name], axis_names={"tensor"}, in_specs=specs, out_specs=P(None, "tensor"), check_vma=False
    )
    return jax.value_and_grad(lambda x, w: (f(x, w) ** 2).sum())


@pytest.mark.parametrize(("platform", "described"), compilers.COMPILERS.values())
@pytest.mark.parametrize("name", ["gather and scatter", "all to all"])  # TPUs all-reduce, and slice, what is stacked
def test_the_ledger_is_what_is_compiled(name, platform, described):
    """XLA's partitioner would gather their operands along the other axes."""
    length, features = (32, 128) if platform == "cpu" else (1024, 512)  # the TPU compiler all-reduces small arrays
    args = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((8, length, features), (features, features))]
    in_shardings = P("data", "tensor"), P()
    predicted, compiled = compilers.predicted_and_compiled(
        step(name), args, platform, described, SIZES, in_shardings=in_shardings
    )
    assert predicted == compiled


@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_are_those_of_replicated_arrays(name):
    rng = np.random.default_rng(0)
    args = rng.standard_normal((4, 16, 8)).astype(np.float32), rng.standard_normal((8, 8)).astype(np.float32)
    with sharding.mesh(SIZES):
        found = sharding.jit(step(name), in_shardings=(P("data", "tensor"), P()))(*args)
    with sharding.mesh(tensor=4, devices=jax.devices()[:4]):
        expected = jax.jit(step(name))(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, expected)
