"""What one program holds between ticks, and how long it is: as the schedule says, not as it has microbatches."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

import sharding
from sharding import P, pipeline
from sharding.pipeline import schedules

STAGES, SAMPLES, FEATURES = 4, 64, 32


def stage_fn(w, x):
    """Keeps what is eight times as large as its input, and much more than its weights."""
    return x + jnp.tanh(jnp.tanh(x @ w["a"]) @ w["b"]) @ w["c"]


def loss_fn(y, target):
    return jnp.square(y - target).mean()


@functools.cache
def compiled(schedule):
    """A step for shapes, of which nothing runs."""
    params = {
        "a": jax.ShapeDtypeStruct((schedule.stages, FEATURES, 4 * FEATURES), jnp.float32),
        "b": jax.ShapeDtypeStruct((schedule.stages, 4 * FEATURES, 4 * FEATURES), jnp.float32),
        "c": jax.ShapeDtypeStruct((schedule.stages, 4 * FEATURES, FEATURES), jnp.float32),
    }
    batch = jax.ShapeDtypeStruct((schedule.microbatches, 16 * SAMPLES, FEATURES), jnp.float32)
    with sharding.mesh(pipe=schedule.devices, devices=jax.devices()[: schedule.devices]) as mesh:
        split = jax.NamedSharding(mesh, P("pipe"))
        step = jax.jit(pipeline.value_and_grad(stage_fn, loss_fn, schedule, placed=True))
        params = {k: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=split) for k, v in params.items()}
        return step.lower(params, batch, batch).compile()


def temporary_bytes(schedule):
    return compiled(schedule).memory_analysis().temp_size_in_bytes


ACTIVATION_BYTES = 4 * 16 * SAMPLES * (FEATURES + 8 * FEATURES)


def instructions(schedule):
    """Lines of HLO that are an instruction."""
    return sum(bool(re.match(r"\s+(ROOT )?%?[\w.-]+ = ", line)) for line in compiled(schedule).as_text().splitlines())
