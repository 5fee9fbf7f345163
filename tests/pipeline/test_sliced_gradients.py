"""Sliced sequences through a causal model: loss and gradients equal those of full sequences."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from support.pipeline_reference import max_relative_error, normal, tokens

import sharding
from sharding import P, pipeline
from sharding.errors import ShardingError
from sharding.models import gpt
from sharding.pipeline import Schedule, Task, schedules

TOLERANCE = 1e-5
SAMPLES, LENGTH, FEATURES, VOCAB = 2, 12, 8, 12


def attention(w, x, keys, values, start):
    """Causal attention of the tokens from `start` on."""
    scores = jnp.einsum("bsf,btf->bst", x @ w["query"], keys) / FEATURES**0.5
    seen = jnp.arange(keys.shape[1])[None] <= start + jnp.arange(x.shape[1])[:, None]
    return x + jnp.tanh(jax.nn.softmax(jnp.where(seen[None], scores, -jnp.inf)) @ values @ w["out"])


def kept(w, x, context):
    """With a fixed-size buffer for the keys and values of all tokens."""
    start = context["start"]
    keys, values = (
        jax.lax.dynamic_update_slice_in_dim(context[name], x @ w[name], start, axis=1) for name in ("key", "value")
    )
    after = {"key": keys, "value": values, "start": start + x.shape[1]}
    return attention(w, x, keys, values, start), after


def grown(w, x, context):
    """With the keys and values of the tokens so far."""
    keys, values = (jnp.concatenate([context[name], x @ w[name]], axis=1) for name in ("key", "value"))
    return attention(w, x, keys, values, context["key"].shape[1]), {"key": keys, "value": values}


def room(length):
    return {name: jnp.zeros((SAMPLES, length, FEATURES)) for name in ("key", "value")}


FORMS = {"kept": (kept, room(LENGTH) | {"start": jnp.int32(0)}), "grown": (grown, room(0))}


def embedded(own, part, shared):
    words, start = part
    return shared["table"][words] + jax.lax.dynamic_slice_in_dim(own["position"], start, words.shape[1], axis=1)


def logits(own, y, shared):
    return (y * own["scale"]) @ shared["table"].T


def share(output, target):
    """A slice's share of the mean over a microbatch's tokens."""
    return -jnp.take_along_axis(jax.nn.log_softmax(output), target[..., None], -1).sum() / (SAMPLES * LENGTH)


def params(stages):
    """Small enough that full sequences on one device are within much less than `TOLERANCE` of 64-bit results."""
    names = ("query", "key", "value", "out")
    return {
        "stages": {name: normal(seed, stages, FEATURES, FEATURES) / 4 for seed, name in enumerate(names)},
        "first": {"position": normal(4, 1, LENGTH, FEATURES) / 2},
        "last": {"scale": jnp.full((1, 1, FEATURES), 1.5)},
        "shared": {"table": normal(5, VOCAB, FEATURES) / 2},
    }


def batch(microbatches):
    return tokens(6, microbatches, SAMPLES, LENGTH), tokens(7, microbatches, SAMPLES, LENGTH)


def sliced(words, targets, lengths):
    """Per slice its tokens and their start, and its targets."""
    starts = [0, *itertools.accumulate(lengths)][:-1]
    cuts = [slice(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    inputs = [(words[..., cut], jnp.full(len(words), cut.start, jnp.int32)) for cut in cuts]
    return inputs, [targets[..., cut] for cut in cuts]


@functools.cache
def reference(stages, microbatches):
    """Full sequences, microbatch by microbatch and stage by stage on one device."""
    words, targets = batch(microbatches)

    def loss(params):
        total = jnp.zeros(())
        for one, target in zip(words, targets, strict=True):
            x = embedded(params["first"], (one, 0), params["shared"])
            for stage in range(stages):
                w = {name: leaf[stage] for name, leaf in params["stages"].items()}
                x = attention(w, x, x @ w["key"], x @ w["value"], 0)
            total += share(logits(params["last"], x, params["shared"]), target)
        return total / microbatches

    return jax.tree.map(np.asarray, jax.jit(jax.value_and_grad(loss))(params(stages)))


def check(schedule, lengths, *, form="kept", executor="spmd", axes=None, **options):
    axes = axes or {}
    stage_fn, context = FORMS[form]
    devices = jax.devices()[: schedule.devices * int(np.prod([1, *axes.values()]))]
    with sharding.mesh(pipe=schedule.devices, **axes, devices=devices) as mesh:
        step = pipeline.value_and_grad(
            stage_fn,
            share,
            schedule,
            first_fn=embedded,
            last_fn=logits,
            executor=executor,
            context=context,
            **options,
        )
        words, targets = batch(schedule.microbatches)
        if "data" in axes:
            words, targets = jax.device_put((words, targets), NamedSharding(mesh, P(None, "data")))
        given = params(schedule.stages), *sliced(words, targets, lengths)
        found = (sharding.jit(step) if executor == "spmd" else step)(*given)
        found = jax.tree.map(np.asarray, found)
    assert max_relative_error(found, reference(schedule.stages, schedule.microbatches)) <= TOLERANCE


TERAPIPE = schedules.terapipe(stages=2, microbatches=2, slices=3)


@pytest.mark.parametrize("executor", ["spmd", "mpmd"])
def test_slices_of_one_length(executor):
    check(TERAPIPE, (4, 4, 4), executor=executor)


def test_slices_of_other_lengths_with_a_context_that_grows():
    check(TERAPIPE, (6, 4, 2), form="grown", executor="mpmd")


@pytest.mark.parametrize("executor", ["spmd", "mpmd"])
def test_one_slice_is_the_whole(executor):
    check(schedules.one_f_one_b(stages=2, microbatches=2), (LENGTH,), executor=executor)


def one_microbatch_after_the_other(stages, microbatches, slices):
    """A user-defined schedule: each microbatch's slices forward and backward before the next, with split backwards."""
    orders = []
    for stage in range(stages):
        order = []
        for microbatch in range(microbatches):
            order += [Task("forward", stage, microbatch, part) for part in range(slices)]
            order += [Task("backward-input", stage, microbatch, part) for part in reversed(range(slices))]
            order += [Task("backward-weight", stage, microbatch, part) for part in range(slices)]
        orders.append(order)
    return Schedule(name="mine", orders=orders, stages=stages, microbatches=microbatches, slices=slices)


@pytest.mark.parametrize("executor", ["spmd", "mpmd"])
def test_a_table_of_ones_own_with_backwards_in_parts(executor):
    check(one_microbatch_after_the_other(2, 2, 2), (6, 6), executor=executor)


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["spmd", "mpmd"])
@pytest.mark.parametrize("remat", [None, True, jax.checkpoint_policies.dots_saveable], ids=["all", "remat", "dots"])
@pytest.mark.parametrize("axes", [{}, {"data": 2}], ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sizes", [(1, 2, 4), (2, 1, 3), (4, 3, 2), (4, 2, 6)], ids=str)
def test_slices_on_a_grid(sizes, form, axes, remat, executor):
    if form == "grown" and executor == "spmd":
        pytest.skip("one program has contexts of one shape")
    stages, microbatches, slices = sizes
    schedule = schedules.terapipe(stages=stages, microbatches=microbatches, slices=slices)
    equal = (LENGTH // slices,) * slices
    lengths = equal if form == "kept" else (LENGTH - slices + 1, *[1] * (slices - 1))
    check(schedule, lengths, form=form, axes=axes, remat=remat, executor=executor)


def check_gpt(stages, sizes, lengths, *, executor, positions="rotary", grows=False):
    config = gpt.Config(
        vocab=VOCAB, context=LENGTH, layers=sum(sizes), features=16, heads=4, kv_heads=2, mlp_features=24,
        positions=positions,
    )  # fmt: skip
    shapes = nnx.eval_shape(lambda: gpt.GPT(config, rngs=nnx.Rngs(0)))
    words, targets = batch(2)
    inputs = pipeline.sliced(words, lengths)
    one = jax.tree.map(lambda leaf: leaf[0], inputs[0])
    cut = pipeline.split(shapes, stages, sizes=sizes, inputs=one, sliced=True)
    chance = np.random.default_rng(1)
    given = jax.tree.map(lambda leaf: jnp.asarray(chance.normal(size=leaf.shape) / 4, leaf.dtype), cut.params)

    def whole(params):
        model = cut.merge(params)
        return sum(gpt.loss(model(words[m]), targets[m]) for m in range(2)) / 2

    wanted = jax.tree.map(np.asarray, jax.jit(jax.value_and_grad(whole))(given))
    schedule = schedules.terapipe(stages=stages, microbatches=2, slices=len(lengths))
    past = gpt.GPT.past(shapes, SAMPLES, None if grows else LENGTH)
    with sharding.mesh(pipe=stages, devices=jax.devices()[:stages]):
        step = pipeline.value_and_grad(
            cut.stage_fn,
            lambda logits, target: gpt.loss(logits, target) * target.shape[-1] / LENGTH,
            schedule,
            first_fn=cut.first_fn,
            last_fn=cut.last_fn,
            context=cut.context(past),
            executor=executor,
        )
        step = sharding.jit(step) if executor == "spmd" else step
        found = step(given, inputs, [target for target, _ in pipeline.sliced(targets, lengths)])
    assert max_relative_error(jax.tree.map(np.asarray, found), wanted) <= TOLERANCE


def test_gpt_in_slices():
    check_gpt(2, (1, 1), (8, 4), executor="mpmd", grows=True)


@pytest.mark.slow
def test_gpt_in_slices_of_uneven_stages():
    check_gpt(2, (2, 1), (6, 4, 2), executor="mpmd", grows=True)


@pytest.mark.slow
@pytest.mark.parametrize("positions", ["rotary", "learned"])
@pytest.mark.parametrize("executor", ["spmd", "mpmd"])
@pytest.mark.parametrize("sizes", [(1, 1), (1, 2), (1, 1, 1, 1)], ids=str)
def test_gpt_in_slices_on_a_grid(sizes, executor, positions):
    check_gpt(len(sizes), sizes, (4, 4, 4), executor=executor, positions=positions)


def refused(*, lengths=(4, 4, 4), form="kept", schedule=TERAPIPE, context=None, stage_fn=None, executor="spmd"):
    own, default = FORMS[form]
    with sharding.mesh(pipe=2, devices=jax.devices()[:2]):
        with pytest.raises(ShardingError, match="pipeline") as caught:
            pipeline.value_and_grad(
                stage_fn or own,
                share,
                schedule,
                first_fn=embedded,
                last_fn=logits,
                executor=executor,
                context=default if context is None else context,
            )(params(2), *sliced(*batch(2), lengths))
    return str(caught.value)


def test_as_many_slices_as_the_schedule_has():
    text = refused(lengths=(6, 6))
    assert "2 slices" in text
    assert "one pytree per slice, 3 in total" in text


def test_one_program_wants_slices_and_contexts_of_one_shape():
    text = refused(lengths=(6, 4, 2))
    assert "float32[2, 6, 8]" in text
    assert "executor='mpmd'" in text
    assert "context" in refused(form="grown")


def test_stages_return_the_next_context():
    assert "(y, the next slice's context)" in refused(stage_fn=lambda w, x, context: x)
    text = refused(stage_fn=lambda w, x, context: (x, context["key"]), executor="mpmd")
    assert "contexts of one structure" in text


def test_without_a_context_sequences_are_whole():
    with pytest.raises(ShardingError, match="3 slices per sequence") as caught:
        pipeline.value_and_grad(kept, share, TERAPIPE)
    assert "context=" in str(caught.value)
