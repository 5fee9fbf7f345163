"""Live arrays at each program point: they sum to the memory report's timeline, and its maximum is the report's peak."""

import jax
import jax.numpy as jnp
import pytest

import sharding
from sharding import P
from sharding.explain.memory_report import report
from sharding.explain.memory_timeline import memory_timeline
from sharding.memory import usage

W = jax.ShapeDtypeStruct((64, 64), jnp.float32)
X = jax.ShapeDtypeStruct((512, 64), jnp.float32)


def layers(w, x):
    return jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2)


def looped(w, x):
    x, _ = jax.lax.scan(lambda c, _: (jnp.sin(c @ w) @ w, None), x, length=5)
    return jnp.sum(jax.lax.cond(x.sum() > 0, lambda c: jnp.cumsum(c, axis=1) @ w, lambda c: c, x))


@pytest.fixture(params=[jax.grad(layers), jax.value_and_grad(looped)], ids=["layers", "loops"])
def found(request):
    with sharding.mesh({"data": 2}, devices=2):
        c = sharding.jit(request.param, in_shardings=(None, P("data"))).complete(W, X)
    used = usage(c.assignment)
    return memory_timeline(c.assignment, used), report(c.assignment, used)


def test_program_points_match_the_reports_timeline(found):
    points, memory = found
    sizes = points.num_bytes()
    ends = [k for k, depth in enumerate(points.depths) if depth == 0]
    assert len(ends) == len(memory.timeline) and len(points.sources) == len(sizes)
    begun = 0
    for end, moment in zip(ends, memory.timeline, strict=True):
        assert max(sizes[begun : end + 1]) == moment.num_bytes
        assert points.sources[end] == moment.source
        begun = end + 1


def test_the_largest_program_point_has_the_arrays_of_the_peak(found):
    points, memory = found
    sizes = points.num_bytes()
    peak = [(a.name, a.kind, a.num_bytes) for a in memory.arrays]
    largest = [k for k, n in enumerate(sizes) if n == max(sizes)]
    live = [[*points.resident, *(a for a in points.transient if a.born <= k <= a.dies)] for k in largest]
    assert sorted(peak) in [sorted((a.name, a.kind, a.num_bytes) for a in arrays) for arrays in live]
