"""The communication ledger of a pipelined program counts a task's collectives per run, as the compiled HLO does."""

import jax
import jax.numpy as jnp
import pytest
from support.all_schedules import make_schedule

import sharding
from sharding import P, pipeline
from sharding.cost import read_compiled

SAMPLES, FEATURES, HIDDEN = 8, 16, 32
BYTES = 4 * SAMPLES * FEATURES
SLOW = ("zb_h1", "interleaved-2", "chimera", "gpipe", "zb_v")


def stage_fn(w, x):
    """Megatron's column- and row-parallel pair: one all-reduce forward and one backward."""
    into, out = sharding.annotate(w["in"], P(None, "tensor")), sharding.annotate(w["out"], P("tensor"))
    return x + jnp.tanh(x @ into) @ out


def loss_fn(y, target):
    return jnp.square(y - target).mean()


@pytest.mark.parametrize("name", ["one_f_one_b", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
@pytest.mark.parametrize("microbatches", [4, pytest.param(6, marks=pytest.mark.slow)])
def test_tasks_count_as_often_as_they_run(name, microbatches):
    schedule = make_schedule(name, 2, microbatches)
    shapes = {"in": (FEATURES, HIDDEN), "out": (HIDDEN, FEATURES)}
    params = {key: jax.ShapeDtypeStruct((schedule.stages, *shape), jnp.float32) for key, shape in shapes.items()}
    batch = jax.ShapeDtypeStruct((microbatches, SAMPLES, FEATURES), jnp.float32)
    with sharding.mesh(pipe=2, tensor=2, devices=jax.devices()[:4]):
        step = sharding.jit(pipeline.value_and_grad(stage_fn, loss_fn, schedule))
        ledger = step.complete(params, batch, batch).communication()
        compiled = read_compiled(step.lower(params, batch, batch).compile())
    assert ledger.by_kind() == compiled.by_kind()
    assert all(collective.is_counted for collective in compiled.collectives)
    runs = [sum(task.kind == "forward" for task in order) for order in schedule.orders]
    sums = [c for c in ledger if c.axes == ("tensor",) and c.result_bytes == BYTES]
    assert sum(c.count for c in sums) == 2 * max(runs)
