"""Sums of reductions over devices as reductions of sums."""

import jax
import jax.numpy as jnp
import pytest

import sharding
from sharding import P
from sharding.cost import SUMS
from sharding.memory.compiler_traits import TRAITS
from sharding.memory.device_program import lower

N = 256


def queries_keys_values(x, w):
    return jnp.tanh(x @ w[0] + x @ w[1] + x @ w[2])


def used_twice(x, w):
    first = x @ w[0]
    return jnp.tanh(first + x @ w[1]) * first


def scanned(x, w):
    return jax.lax.scan(lambda c, _: (queries_keys_values(c, w), None), x, None, length=3)[0]


def num_reductions(f, platform):
    x, w = jax.ShapeDtypeStruct((8, N), "float32"), [jax.ShapeDtypeStruct((N, N), "float32")] * 3
    with sharding.mesh({"model": 8}):
        found = sharding.jit(f, in_shardings=(P(None, "model"), P("model"))).complete(x, w)
    return live_reductions(lower(found.assignment, TRAITS[platform]).body)


def live_reductions(body):
    live = body.live_instructions()
    return sum(one.name in SUMS for one in live) + sum(live_reductions(b) for one in live for b in one.bodies)


@pytest.mark.parametrize(
    ("f", "cpu", "accelerator"), [(queries_keys_values, 3, 1), (used_twice, 2, 2), (scanned, 3, 1)]
)
def test_partial_sums_that_are_only_added_are_reduced_once(f, cpu, accelerator):
    assert num_reductions(f, "cpu") == cpu
    assert num_reductions(f, "gpu") == num_reductions(f, "tpu") == accelerator
