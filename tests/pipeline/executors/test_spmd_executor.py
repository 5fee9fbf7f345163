"""Memory and size of the single program: determined by the schedule, not by the number of microbatches."""

import functools
import importlib.util
import itertools
import math
import re

import jax
import jax.numpy as jnp
import pytest
from support.all_schedules import make_schedule

import sharding
from sharding import P, pipeline
from sharding.cost import compile_only
from sharding.pipeline import schedules
from sharding.pipeline.executors.stage_programs import trace_stage
from sharding.pipeline.executors.tick_tables import tick_tables

LAYERS, SAMPLES, FEATURES = 6, 512, 16
"""Of one device's part of the model, whose residuals are much larger than its weights."""


def stage_fn(w, x):
    for layer in range(w.shape[0]):
        x = x + jnp.tanh(x @ w[layer])
    return x


def loss_fn(y, target):
    return jnp.square(y - target).mean()


def weights(schedule):
    return jax.ShapeDtypeStruct((LAYERS // schedule.chunks, FEATURES, FEATURES), jnp.float32)


MICROBATCH = jax.ShapeDtypeStruct((SAMPLES, FEATURES), jnp.float32)


@functools.cache
def compiled(schedule, described=None, features=FEATURES):
    """A compiled step, never run."""
    one = jax.ShapeDtypeStruct((LAYERS // schedule.chunks, features, features), jnp.float32)
    batch = jax.ShapeDtypeStruct((schedule.microbatches, SAMPLES, features), jnp.float32)
    devices = jax.devices() if described is None else compile_only(described)
    with sharding.mesh(pipe=schedule.devices, devices=devices[: schedule.devices]) as mesh:
        split = jax.NamedSharding(mesh, P("pipe"))
        params = jax.ShapeDtypeStruct((schedule.stages, *one.shape), one.dtype, sharding=split)
        order = jax.eval_shape(lambda: pipeline.place(jax.numpy.zeros(schedule.stages), schedule)).order
        params = pipeline.PlacedStages(params, order)
        step = jax.jit(pipeline.value_and_grad(stage_fn, loss_fn, schedule, placed=True))
        return step.lower(params, batch, batch).compile()


def temporary_bytes(schedule, **options):
    return compiled(schedule, **options).memory_analysis().temp_size_in_bytes


def kept_bytes(schedule):
    """Residuals of one microbatch through one device's part of the model."""
    shapes = trace_stage(stage_fn, weights(schedule), MICROBATCH).residual_shapes
    return schedule.chunks * sum(math.prod(shape.shape) * shape.dtype.itemsize for shape in shapes)


def task_bytes(schedule):
    """All residuals of ``jax.vjp`` for one microbatch through one device's part of the model, cheap or not."""
    _, vjp = jax.eval_shape(lambda w, x: jax.vjp(stage_fn, w, x), weights(schedule), MICROBATCH)
    return schedule.chunks * sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(vjp))


def slot_bytes(schedule):
    """Buffers of all slots."""
    num = tick_tables(schedule).num_slots
    activation_bytes = 4 * math.prod(MICROBATCH.shape)
    return (
        num["residual"] * kept_bytes(schedule) // schedule.chunks + (num["input"] + num["gradient"]) * activation_bytes
    )


def instructions(schedule):
    """Number of HLO instructions."""
    return sum(bool(re.match(r"\s+(ROOT )?%?[\w.-]+ = ", line)) for line in compiled(schedule).as_text().splitlines())


def test_1f1b_memory_does_not_grow_with_microbatches():
    few, many = (temporary_bytes(schedules.one_f_one_b(stages=4, microbatches=m)) for m in (4, 32))
    assert few <= many <= 1.05 * few


def test_gpipe_memory_grows_with_each_microbatch():
    """Exactly its slots: nothing copies them."""
    found = [temporary_bytes(schedules.gpipe(stages=4, microbatches=m)) for m in (4, 8, 16, 32)]
    each = [(b - a) / n for (a, b), n in zip(itertools.pairwise(found), (4, 8, 16), strict=True)]
    activation_bytes = 4 * math.prod(MICROBATCH.shape)
    slot = kept_bytes(schedules.gpipe(stages=4, microbatches=4)) + activation_bytes
    for grown in each:
        assert slot <= 1.001 * grown
        assert grown <= slot + 1.1 * activation_bytes


def test_memory_is_ordered_as_simulated():
    names = ("one_f_one_b", "interleaved-2", "eager_1f1b", "dapple-B", "gpipe")
    found = [make_schedule(name, 4, 8) for name in names]
    peaks = [max(schedule.simulate().peak_activations) for schedule in found]
    assert peaks == [4, 5.5, 7, 7, 8]
    held = [temporary_bytes(schedule) for schedule in found]
    assert held[0] < held[1] < held[2] < held[4]
    assert held[3] == pytest.approx(held[2], rel=0.05)
    for schedule, bytes_ in zip(found, held, strict=True):  # plus the temporaries of a task
        assert 0 < bytes_ - slot_bytes(schedule) < 3 * task_bytes(schedule)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_memory_on_described_tpus():
    """The same with the TPU compiler: constant, growing in equal steps, ordered."""
    held = functools.partial(temporary_bytes, described="v5p:2x2x1", features=128)
    few, many = (held(schedules.one_f_one_b(stages=4, microbatches=m)) for m in (4, 32))
    assert many == pytest.approx(few, rel=0.05)
    found = [held(schedules.gpipe(stages=4, microbatches=m)) for m in (4, 8, 16, 32)]
    each = [(b - a) / n for (a, b), n in zip(itertools.pairwise(found), (4, 8, 16), strict=True)]
    assert each == pytest.approx([each[0]] * 3, rel=0.05)
    names = ("one_f_one_b", "interleaved-2", "eager_1f1b", "dapple-B", "gpipe")
    one, interleaved, eager, dapple, gpipe = (held(make_schedule(name, 4, 8)) for name in names)
    assert one < interleaved < eager < gpipe
    assert dapple == pytest.approx(eager, rel=0.05)


def test_more_in_flight_takes_more_with_split_backwards():
    first, second = (make_schedule(name, 4, 16) for name in ("zb_h1", "zb_h2"))
    assert max(first.simulate().peak_activations) < max(second.simulate().peak_activations)
    assert temporary_bytes(first) < temporary_bytes(second)


@pytest.mark.parametrize("name", ["one_f_one_b", "zb_v", "interleaved-2"])
def test_program_size_does_not_depend_on_microbatches(name):
    few, many = make_schedule(name, 4, 8), make_schedule(name, 4, 64)
    assert instructions(few) == instructions(many) > 100
