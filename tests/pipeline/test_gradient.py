"""Loss and gradients under every schedule and both executors equal those of one device."""

import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from support.all_schedules import SYNCHRONOUS, make_schedule, synchronous_schedules
from support.pipeline_reference import MLP, TIED, max_relative_error, pipelined, reference

import sharding
from sharding import P, pipeline
from sharding.errors import ShardingError
from sharding.models import gpt
from sharding.pipeline import Schedule, Task, schedules

TOLERANCE = 1e-5
KINDS = sorted({name for name, *_ in SYNCHRONOUS})
MESHES = ({}, {"data": 2}, {"tensor": 2}, {"data": 2, "tensor": 2})
REMATS = (None, True, jax.checkpoint_policies.dots_saveable)
EXECUTORS = {"sharding.jit": {"jit": sharding.jit}, "jax.jit": {"jit": jax.jit}, "mpmd": {"executor": "mpmd"}}


def check(example, schedule, **options):
    assert (
        max_relative_error(
            pipelined(example, schedule, **options), reference(example, schedule.stages, schedule.microbatches)
        )
        <= TOLERANCE
    )


@pytest.mark.parametrize("name", KINDS)
def test_gradients_of_every_schedule(name):
    chance = random.Random(name)
    check(MLP, make_schedule(name, 2, 4), placed=chance.random() < 0.5, jit=chance.choice([jax.jit, sharding.jit]))


@pytest.mark.parametrize("name", ["one_f_one_b", "zb_v", "chimera"])
def test_gradients_with_a_program_per_task(name):
    check(MLP, make_schedule(name, 2, 4), executor="mpmd", placed=name == "zb_v")


@pytest.mark.parametrize("executor", ["jax.jit", "mpmd"])
def test_shared_ends_and_extra_activations(executor):
    check(TIED, schedules.zb_h1(stages=2, microbatches=3), **EXECUTORS[executor])


@pytest.mark.parametrize("executor", ["jax.jit", "mpmd"])
def test_gradients_over_all_axes(executor):
    axes = {"data": 2, "tensor": 2}
    check(MLP, schedules.one_f_one_b(stages=2, microbatches=4), axes=axes, remat=True, **EXECUTORS[executor])


@pytest.mark.parametrize("executor", ["jax.jit", "mpmd"])
def test_a_schedule_with_stages_on_several_devices(executor):
    """Stages on several devices, with full and split backwards mixed."""
    orders = [
        [Task("forward", 0, 0), Task("forward", 2, 1), Task("backward", 2, 1), Task("backward", 0, 0)],
        [
            Task("forward", 0, 1),
            Task("forward", 1, 1),
            Task("forward", 1, 0),
            Task("forward", 2, 0),
            Task("backward-input", 2, 0),
            Task("backward-weight", 2, 0),
            Task("backward-input", 1, 0),
            Task("backward", 1, 1),
            Task("backward-weight", 1, 0),
            Task("backward", 0, 1),
        ],
    ]
    check(MLP, Schedule(name="mine", orders=orders, stages=3, microbatches=2), **EXECUTORS[executor])


def sampled():
    """Every schedule on every number of devices, with other options drawn at random."""
    sizes = ((1, 3), (2, 2), (2, 8), (4, 4), (4, 8), (8, 8))
    for name, (devices, microbatches), executor in itertools.product(KINDS, sizes, EXECUTORS):
        if name.startswith("chimera") and (
            devices % 2 or (name == "chimera-doubling" and microbatches % (2 * devices))
        ):
            continue
        if name.startswith("interleaved") and microbatches % devices:
            continue
        chance = random.Random(f"{name} {devices} {microbatches} {executor}")
        axes = chance.choice([axes for axes in MESHES if devices * 2 ** len(axes) <= 8])
        options = {"axes": axes, "placed": chance.random() < 0.5, "remat": chance.choice(REMATS)}
        yield pytest.param(
            chance.choice([MLP, TIED]),
            (name, devices, microbatches),
            chance.random() < 0.5,
            options | EXECUTORS[executor],
            id=f"{name}-{devices}-{microbatches}-{executor}",
        )


@pytest.mark.slow
@pytest.mark.parametrize(("example", "case", "is_split", "options"), list(sampled()))
def test_gradients_on_a_grid(example, case, is_split, options):
    schedule = make_schedule(*case)
    check(example, schedule.split_backward() if is_split else schedule, **options)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(synchronous_schedules(), st.sampled_from(sorted(EXECUTORS)), st.booleans(), st.sampled_from([MLP, TIED]))
def test_gradients_of_random_tables(schedule, executor, placed, example):
    check(example, schedule, placed=placed, **EXECUTORS[executor])


def tiny(layers):
    """The shapes of a model, since its initialization takes long to compile."""
    config = gpt.Config(
        vocab=32, context=8, layers=layers, features=16, heads=2, kv_heads=2, mlp_features=24, tied=True
    )
    return nnx.eval_shape(lambda: gpt.GPT(config, rngs=nnx.Rngs(0)))


def check_gpt(stages, sizes, schedule, *, axes, executor):
    microbatches, chance = schedule.microbatches, np.random.default_rng(1)
    words = jnp.asarray(chance.integers(32, size=(microbatches, 2, 9)), jnp.int32)
    inputs, targets = words[..., :-1], words[..., 1:]
    cut = pipeline.split(tiny(sum(sizes)), stages, sizes=sizes, inputs=inputs[0])
    params = jax.tree.map(lambda leaf: jnp.asarray(chance.normal(size=leaf.shape) / 4, leaf.dtype), cut.params)

    def whole(params):
        merged = cut.merge(params)
        return sum(gpt.loss(merged(inputs[m]), targets[m]) for m in range(microbatches)) / microbatches

    wanted = jax.tree.map(np.asarray, jax.jit(jax.value_and_grad(whole))(params))
    devices = jax.devices()[: schedule.devices * 2 ** len(axes)]
    with sharding.mesh(pipe=schedule.devices, **axes, devices=devices) as mesh:
        step = pipeline.value_and_grad(
            cut.stage_fn, gpt.loss, schedule, first_fn=cut.first_fn, last_fn=cut.last_fn, executor=executor
        )
        step = sharding.jit(step) if executor == "spmd" else step
        if "data" in axes:
            split = jax.NamedSharding(mesh, P(None, "data"))
            inputs, targets = jax.device_put((inputs, targets), split)
        found = jax.tree.map(np.asarray, step(params, inputs, targets))
    padding = [i for i, size in enumerate(sizes) if size < max(sizes)]
    for leaf in jax.tree.leaves(found[1]["stages"]):
        assert not any(leaf[stage, sizes[stage] :].any() for stage in padding)
    assert max_relative_error(found, wanted) <= TOLERANCE


def test_gpt_with_tied_embeddings_in_uneven_stages():
    check_gpt(2, (2, 1), schedules.one_f_one_b(stages=2, microbatches=2), axes={}, executor="spmd")


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["spmd", "mpmd"])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 1, 1, 2)], ids=str)
@pytest.mark.parametrize("axes", [{}, {"data": 2}], ids=str)
@pytest.mark.parametrize("name", ["one_f_one_b", "zb_h2", "chimera", "zb_v", "dualpipe_v"])
def test_gpt_on_a_grid(name, axes, sizes, executor):
    devices = 2 if name in ("zb_v", "dualpipe_v") else 4
    check_gpt(4, sizes, make_schedule(name, devices, 4), axes=axes, executor=executor)


ONE = schedules.one_f_one_b(stages=2, microbatches=4)


@pytest.fixture
def compiled():
    """Durations of XLA compilations so far."""
    found = []

    def listen(event, seconds, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


def message_of(step, compiled, *, params=None, inputs=None, targets=None):
    """The error message of a call that fails before compilation."""
    params = MLP.params(2) if params is None else params
    batch = MLP.batch(4)
    args = params, batch[0] if inputs is None else inputs, batch[1] if targets is None else targets
    jax.block_until_ready(args)
    before = len(compiled)
    with pytest.raises(ShardingError, match="pipeline") as caught:
        step(*args)
    assert len(compiled) == before
    return str(caught.value)


def refused(compiled, *, schedule=ONE, stage_fn=MLP.stage_fn, loss_fn=MLP.loss_fn, options=None, mesh=None, **given):
    with sharding.mesh(**(mesh or {"pipe": 2}), devices=jax.devices()[:2]):
        step = pipeline.value_and_grad(stage_fn, loss_fn, schedule, **(options or {}))
        return message_of(step, compiled, **given)


@pytest.mark.parametrize("executor", ["spmd", "mpmd"])
def test_wrong_leading_dims(compiled, executor):
    options, batch = {"executor": executor}, MLP.batch(3)
    text = refused(compiled, options=options, inputs=batch[0])
    assert "inputs" in text
    assert "shape [3, 4, 8]" in text
    assert "4, the number of microbatches" in text
    text = refused(compiled, options=options, targets=batch[1])
    assert "targets" in text
    assert "4, the number of microbatches" in text
    text = refused(compiled, options=options, params=MLP.params(3))
    assert "stages/a" in text
    assert "stages/b" in text
    assert "shape [3, 8, 16]" in text
    assert "2, the number of stages" in text


def test_placed_parameters_have_a_row_per_device_stage(compiled):
    schedule = schedules.chimera(stages=2, microbatches=4)
    short = pipeline.PlacedStages(MLP.params(2), pipeline.place(jnp.arange(2), schedule).order)
    text = refused(compiled, schedule=schedule, options={"placed": True}, params=short)
    assert "a leading dim of 4" in text
    assert "pipeline.place" in text


@pytest.mark.parametrize("executor", ["spmd", "mpmd"])
def test_stages_in_another_order_than_said_are_refused(compiled, executor):
    schedule, params = schedules.zb_v(stages=2, microbatches=4), MLP.params(4)
    in_device_order = pipeline.place(params, schedule)
    options = {"executor": executor}
    text = refused(compiled, schedule=schedule, options=options, params=in_device_order)
    assert "pipeline.place put in device order: [0, 3, 1, 2]" in text and "placed=True" in text
    text = refused(compiled, schedule=schedule, options={**options, "placed": True}, params=params)
    assert "do not come from pipeline.place" in text
    other = schedules.interleaved(stages=2, microbatches=4, chunks=2)
    text = refused(compiled, schedule=other, options={**options, "placed": True}, params=in_device_order)
    assert "placed for another schedule" in text


def test_meshes_that_do_not_fit(compiled):
    text = refused(compiled, mesh={"data": 2})
    assert "no axis 'pipe'" in text or "the mesh data=2" in text
    assert "axis='data'" in text
    text = refused(compiled, schedule=schedules.gpipe(stages=4, microbatches=4), params=MLP.params(4))
    assert "the mesh pipe=2" in text
    assert "gpipe over 4 devices" in text
    assert "sharding.mesh(pipe=4, ...)" in text
    text = message_of(pipeline.value_and_grad(MLP.stage_fn, MLP.loss_fn, ONE), compiled)
    assert "no mesh" in text
    assert "with sharding.mesh(pipe=2)" in text


@pytest.mark.parametrize(
    ("stage_fn", "there"),
    [
        (lambda w, x: x @ w["a"], "x: it gets float32[4, 8], it returns float32[4, 16]"),
        (lambda w, x: x.astype(jnp.bfloat16), "x: it gets float32[4, 8], it returns bfloat16[4, 8]"),
        (lambda w, x: (x, x), "it returns PyTreeDef((*, *))"),
    ],
)
def test_stages_that_change_their_activations(compiled, stage_fn, there):
    text = refused(compiled, stage_fn=stage_fn)
    assert there in text
    assert "the input's structure, shapes and dtypes" in text


def test_losses_that_are_no_scalars(compiled):
    assert "it returns float32[4, 8]" in refused(compiled, loss_fn=lambda y, t: y - t)
    assert "it returns int32[]" in refused(compiled, loss_fn=lambda y, t: jnp.int32(0))
    assert "it returns tuple" in refused(compiled, loss_fn=lambda y, t: (y.mean(), y.mean()))


def test_parameters_in_parts(compiled):
    options = {"first_fn": lambda own, x: x}
    assert "the keys 'a', 'b'" in refused(compiled, options=options)
    assert "list" in refused(compiled, options=options, params=[jnp.ones(2)])
    text = refused(compiled, options=options, params={"stages": MLP.params(2), "middle": jnp.ones(2)})
    assert "'stages', 'middle'" in text
    assert "'first', 'stages', 'last', 'shared'" in text


@pytest.mark.parametrize(
    ("schedule", "there"),
    [
        (schedules.pipedream(stages=2, microbatches=4), "an update after every 1 of 4"),
        (schedules.pipedream_2bw(stages=2, microbatches=4), "an update after every 2 of 4"),
        (schedules.hetpipe(stages=2, microbatches=4), "an update after every"),
    ],
    ids=lambda it: getattr(it, "name", ""),
)
def test_schedules_of_several_weights(schedule, there):
    with pytest.raises(ShardingError, match="value_and_grad") as caught:
        pipeline.value_and_grad(MLP.stage_fn, MLP.loss_fn, schedule)
    assert there in str(caught.value)
    assert schedule.name in str(caught.value)


def test_a_schedule_that_deadlocks():
    orders = [[Task("backward", 0, 0), Task("forward", 0, 0)]]
    with pytest.raises(ShardingError, match="mine"):
        pipeline.value_and_grad(
            MLP.stage_fn, MLP.loss_fn, Schedule(name="mine", orders=orders, stages=1, microbatches=1)
        )


def test_executors(compiled):
    with pytest.raises(ShardingError, match="'spmd' or 'mpmd'"):
        pipeline.value_and_grad(MLP.stage_fn, MLP.loss_fn, ONE, executor="threads")
    step = pipeline.value_and_grad(MLP.stage_fn, MLP.loss_fn, ONE, executor="mpmd")
    with sharding.mesh(pipe=2, devices=jax.devices()[:2]):
        text = message_of(jax.jit(step), compiled)
    assert "inside a trace" in text
    assert "executor='spmd'" in text
    with sharding.mesh(pipe=2, devices=2):
        assert "a mesh over described devices" in message_of(step, compiled)


def test_place_requires_every_stage():
    with pytest.raises(ShardingError, match=r"place.*\n.*shape \[3, 8, 16\]"):
        pipeline.place(MLP.params(3), ONE)
