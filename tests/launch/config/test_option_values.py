"""Meshes, batches, pipelines, sequences, ZeRO and text: what each option becomes, and which values are refused."""

import itertools
import math

import jax.numpy as jnp
import optax
import pytest

import sharding
from sharding import ShardingError, zero
from sharding.launch.config.explain_config import Explain
from sharding.launch.config.mesh_config import BATCH_AXES, batch_parts, check_batch, parse_mesh
from sharding.launch.config.optimizer_config import Optimization, OptimizationOptions, check_zero
from sharding.launch.config.pipeline_config import SCHEDULES, PipelineConfig, PipelineOptions
from sharding.launch.config.sequence_config import SequenceConfig, SequenceOptions
from sharding.launch.config.text_config import MIN_VOCAB, TextOptions
from sharding.launch.config.train_config import Recipe, Train
from sharding.launch.elastic_mesh import fewer_devices
from sharding.launch.optimizer import learning_rate, with_zero


def test_batches_are_sharded_over_the_batch_axes_and_microbatches():
    sizes = [dict(zip(("data", "fsdp", "expert", "tensor"), chosen, strict=True))
             for chosen in itertools.product((1, 2, 3), (1, 2), (1, 2), (1, 4))]  # fmt: skip
    for axes, accumulate, microbatches in itertools.product(sizes, (1, 2), (None, 1, 3)):
        parts = math.prod(axes[axis] for axis in BATCH_AXES)
        assert batch_parts(axes) == parts
        pipeline = microbatches and PipelineConfig(devices=2, schedule="gpipe", microbatches=microbatches)
        parts *= accumulate * (microbatches or 1)
        for batch in range(1, 30):
            if batch % parts == 0:
                check_batch(batch, axes, accumulate, pipeline or None)
                continue
            with pytest.raises(ShardingError, match=f"= {parts} parts") as caught:
                check_batch(batch, axes, accumulate, pipeline or None)
            near = int(caught.value.fix[0].removeprefix("--batch "))
            assert near > 0 and near % parts == 0
            assert abs(near - batch) == min(abs(n - batch) for n in range(parts, 3 * (batch + parts), parts))
            assert (" and microbatch" in caught.value.required) == (accumulate > 1 or (microbatches or 1) > 1)
    assert batch_parts({}) == 1
    check_batch(7, {"data": -1, "fsdp": 2})  # how many devices are left is not known yet


def test_one_size_may_be_left_open():
    assert parse_mesh("data = 2 , pipe=-1") == {"data": 2, "pipe": -1}
    for text in ("data=-2", "=2", "data=", "data", "data=2,,tensor=2", "data=1.5"):
        with pytest.raises(ShardingError, match="name=size"):
            parse_mesh(text)


@pytest.mark.parametrize("schedule", [None, *SCHEDULES])
def test_pipelines(schedule: str | None):
    for devices, microbatches in itertools.product((2, 3), (None, 1, 5)):
        found = PipelineOptions(schedule=schedule, microbatches=microbatches).resolve({"pipe": devices, "data": 2})
        assert found is not None and found.devices == devices and found.schedule == (schedule or "1f1b")
        assert found.microbatches == (microbatches or 2 * devices)
        assert found.slices == (devices if schedule == "terapipe" else 1) and found.executor is None


def test_pipelines_that_are_not_one():
    assert PipelineOptions().resolve({"data": 2}) is None is PipelineOptions().resolve({"pipe": 1})
    with pytest.raises(ShardingError, match="no pipe axis") as caught:
        PipelineOptions(schedule="gpipe", microbatches=1).resolve({"pipe": 1})
    assert "--schedule gpipe --microbatches 1" in str(caught.value)
    PipelineOptions(microbatches=2).resolve({"pipe": 2}, 1)
    with pytest.raises(ShardingError, match="--accumulate 2 --mesh pipe=2"):
        PipelineOptions().resolve({"pipe": 2}, 2)
    for option in ("microbatches", "slices"):
        PipelineOptions(**{option: 1}, schedule="terapipe")
        with pytest.raises(ShardingError, match=f"--{option} 0"):
            PipelineOptions(**{option: 0}, schedule="terapipe")
    assert PipelineOptions(slices=5, schedule="terapipe").resolve({"pipe": 2}).slices == 5
    for schedule in (None, "gpipe"):
        with pytest.raises(ShardingError, match="a schedule that slices sequences"):
            PipelineOptions(slices=2, schedule=schedule)


def test_sequences():
    pipeline = PipelineConfig(devices=2, schedule="gpipe", microbatches=2)
    for given, pipe in itertools.product((None, "ring", "ring_self", "ulysses"), (None, pipeline)):
        options = SequenceOptions(attention=given)
        if pipe is not None and given in ("ring", "ring_self"):
            with pytest.raises(ShardingError, match=f"--attention {given} --mesh pipe=2,seq=4"):
                options.resolve({"seq": 4}, pipe)
        else:
            kind = given or ("ring" if pipe is None else "ulysses")
            assert options.resolve({"seq": 4}, pipe) == SequenceConfig(devices=4, kind=kind)
        for axes in ({"data": 2}, {"seq": 1}):
            if given is None:
                assert options.resolve(axes, pipe) is None
            else:
                with pytest.raises(ShardingError, match="no seq axis"):
                    options.resolve(axes, pipe)


def test_zero_needs_an_axis_to_shard_over():
    for axes in ({"data": 2}, {"data": -1}):
        for stage in (0, 1, 2, 3):
            check_zero(stage, axes)
    for axes in ({"data": 1}, {"tensor": 2}):
        check_zero(0, axes)
        for stage in (1, 2, 3):
            with pytest.raises(ShardingError, match=f"--zero {stage}"):
                check_zero(stage, axes)


def test_zero_needs_the_option_and_the_axis():
    params, plain = {"w": jnp.zeros((4, 4))}, optax.sgd(0.1)

    def replicated(params: dict) -> dict:
        return dict.fromkeys(params)

    for stage, axis in itertools.product((0, 1), ("data", "tensor")):
        with sharding.mesh({axis: 2}, devices=2):
            found = with_zero(plain, Optimization(zero=stage), params, replicated)
        assert isinstance(found, zero.Sharded) if stage and axis == "data" else found is plain


def test_limits_of_the_optimizer():
    for options in ({"lr": 0.0, "warmup": 0, "weight_decay": 0.0}, {"accumulate": 1, "clip": 1e-9}):
        assert Optimization(**options) == OptimizationOptions(**options).applied_to(Optimization())
    for name, value in {"lr": -1e-9, "warmup": -1, "weight_decay": -0.1, "accumulate": 0, "clip": 0.0}.items():
        with pytest.raises(ShardingError, match=f"--{name.replace('_', '-')} {value}"):
            Optimization(**{name: value})
        with pytest.raises(ShardingError, match=f"--{name.replace('_', '-')} {value}"):
            OptimizationOptions(**{name: value})


@pytest.mark.parametrize(("steps", "warmup"), [(100, 10), (100, 50), (100, 80), (7, 3), (2, 1)])
def test_the_learning_rate(steps: int, warmup: int):
    """Up in equal steps to the peak, then along a cosine to a tenth."""
    schedule, peak = learning_rate(Optimization(lr=0.5, warmup=warmup), steps), min(warmup, steps // 2)
    rates = [float(schedule(step)) for step in range(steps + 1)]
    for step, rate in enumerate(rates):
        if step <= peak:
            low = 0.5 / (peak + 1)
            expected = low + (0.5 - low) * step / peak if peak else 0.5
        else:
            cosine = (1 + math.cos(math.pi * (step - peak) / (steps - peak))) / 2
            expected = 0.05 + 0.45 * cosine
        assert rate == pytest.approx(expected, rel=1e-5)


def test_limits_of_a_run():
    counts = {"steps": 1, "batch": 1, "eval_every": 0, "checkpoint_every": 0, "sample": 0, "devices": 1, "keep": 1}
    for name, least in counts.items():
        options = {"mesh": "data=1", name: least}
        assert getattr(Train(**options), name) == least
        with pytest.raises(ShardingError, match=f"--{name.replace('_', '-')} {least - 1}"):
            Train(**(options | {name: least - 1}))
    assert Train(resume=True, resume_step=0).resume_step == 0
    with pytest.raises(ShardingError, match="--resume-step 0"):
        Train(resume_step=0)
    with pytest.raises(ShardingError, match="accumulate=3"):
        Train(mesh="data=2", batch=4, optimization=OptimizationOptions(accumulate=3))
    Train(mesh="data=2", batch=12, optimization=OptimizationOptions(accumulate=3))
    with pytest.raises(ShardingError, match="microbatches=4"):
        Train(mesh="data=2,pipe=2", batch=12)
    assert Train(batch=3, mesh="data=-1").applied_to(Recipe()).batch == 3


def test_options_of_explain():
    assert Explain(batch=4).batch == 4 and Explain(devices="v5p:2x2x1", aot="v5p:2x2x1").aot
    for options, message in (
        ({"batch": 0}, "--batch 0"),
        ({"batch": 3}, "= 2 parts"),
        ({"batch": 4, "mesh": "data=2,pipe=2"}, "microbatches=4"),
        ({"zero": 1, "mesh": "tensor=2"}, "--zero 1"),
        ({"devices": "v5p:2x2x1", "aot": "v5e:2x2"}, "the same devices"),
    ):
        with pytest.raises(ShardingError, match=message):
            Explain(**options)
    assert Explain(batch=3, mesh="data=-1").batch == 3


def test_vocabularies():
    assert TextOptions(vocab=MIN_VOCAB, tokenizer="bpe").is_given and not TextOptions().is_given
    assert TextOptions(tokenizer="bytes").is_given and TextOptions(vocab=300).is_given
    with pytest.raises(ShardingError, match=f"--vocab {MIN_VOCAB - 1}"):
        TextOptions(vocab=MIN_VOCAB - 1)
    with pytest.raises(ShardingError, match="--tokenizer bytes"):
        TextOptions(vocab=MIN_VOCAB, tokenizer="bytes")


def halved(axes: dict[str, int], available: int) -> dict[str, int]:
    """One halving at a time: of the first batch axis that is even, else of the last other one that is."""
    axes = dict(axes)
    while math.prod(n for n in axes.values() if n != -1) > available:
        order = [*BATCH_AXES, *(axis for axis in reversed(axes) if axis not in BATCH_AXES)]
        even = [axis for axis in order if axes.get(axis, 1) % 2 == 0]
        if not even:
            break
        axes[even[0]] //= 2
    return axes


def test_an_elastic_mesh_is_halved():
    for sizes in itertools.product((1, 2, 3, 4), (-1, 1, 2, 4), (1, 2, 6)):
        for names in (("data", "tensor", "fsdp"), ("pipe", "data", "seq"), ("tensor", "expert", "pipe")):
            axes = dict(zip(names, sizes, strict=True))
            for available in (1, 2, 4, 7, 24):
                before = dict(axes)
                assert fewer_devices(axes, available) == halved(axes, available) and axes == before
