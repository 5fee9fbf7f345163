"""Rotations of sharded arrays, of which devices exchange the rows that move."""

import jax
import jax.numpy as jnp
import pytest
from support import peak_memory

import sharding
from sharding import P, annotate
from sharding.memory.compiler_traits import TRAITS
from sharding.memory.device_program import lower
from sharding.memory.instruction import all_instructions

ROWS, COLUMNS = 1024, 512
SHARD_BYTES = ROWS // 8 * COLUMNS * 4


def neighbours(x):
    return x * 2 + jnp.roll(x, 1, 0) + jnp.roll(x, -3, 0) * jnp.sin(x)


def gradient(x):
    return jax.grad(lambda x: (jnp.tanh(jnp.roll(jnp.sin(x), 5, 0)) ** 2).sum())(x)


@peak_memory.newest_jax_only
@pytest.mark.parametrize("f", [neighbours, gradient])
def test_no_shard_is_stored_more_than_compiled(f):
    peak = peak_memory.peak_of(f, peak_memory.floats(ROWS, COLUMNS), sizes={"data": 8}, in_shardings=P("data"))
    assert peak.ratio == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("platform", TRAITS)
@pytest.mark.parametrize(("shift", "sent"), [(1, [1]), (-3, [3]), (128, [128]), (300, [44, 84]), (1024, [])])
def test_the_rows_that_are_sent(shift, sent, platform):
    with sharding.mesh(data=8):
        step = sharding.jit(lambda x: jnp.roll(x, shift, 0) * 2, in_shardings=P("data"))
        body = lower(step.complete(peak_memory.floats(ROWS, COLUMNS)).assignment, TRAITS[platform]).body
    permutes = [one for one in body.live_instructions() if one.name == "collective-permute"]
    assert sorted(one.shape[0] for one in permutes) == sent


def test_uneven_shards_are_rotated_twice():
    def f(x):
        return jnp.roll(annotate(x[:1001], P("data")), 3, 0).sum(0)

    with sharding.mesh(data=8), pytest.warns(UserWarning, match="1001 over data=8"):
        completion = sharding.jit(f, in_shardings=P("data")).complete(peak_memory.floats(ROWS, COLUMNS))
    found = [one for one in all_instructions(lower(completion.assignment, TRAITS["gpu"]).body) if one.axes]
    rows = sorted(one.shape[0] for one in found if one.name == "collective-permute" and one.shape[0] < 126)
    assert rows == sorted([3, 10])


def test_a_rotation_of_a_whole_dim_sends_nothing():
    with sharding.mesh(data=8):
        step = sharding.jit(lambda x: jnp.roll(x, 1, 1) * 2, in_shardings=P("data"))
        found = step.complete(peak_memory.floats(ROWS, COLUMNS)).memory(platform="gpu")
    assert found.peak_bytes == pytest.approx(2 * SHARD_BYTES, rel=0.01)
