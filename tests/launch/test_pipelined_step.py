"""A pipelined step equals the step of one device."""

import dataclasses

import jax
import numpy as np
import pytest
from support.short_runs import check_same, run_two_steps

import sharding
from sharding import ShardingError
from sharding.launch import main
from sharding.launch.config.optimizer_config import Optimization
from sharding.launch.config.pipeline_config import SCHEDULES, PipelineConfig, PipelineOptions
from sharding.launch.workloads import gpt_text
from sharding.models.gpt import Config

MODEL = Config(vocab=64, context=16, layers=4, features=32, heads=4, kv_heads=4, mlp_features=64, scan=True)
MESHES = [{"pipe": 2}, {"pipe": 2, "data": 2}, {"pipe": 2, "data": 2, "tensor": 2}, {"pipe": 2, "fsdp": 2}]


def step(sizes, schedule="1f1b", microbatches=4, *, remat=False, dropout=0.0, executor="spmd", accumulate=1):
    devices = sizes.get("pipe", 1)
    slices = 4 if schedule == "terapipe" else 1
    pipeline = PipelineConfig(
        devices=devices, schedule=schedule, microbatches=microbatches, slices=slices, executor=executor
    )
    pipeline = pipeline if devices > 1 else None
    model = dataclasses.replace(MODEL, remat=remat, dropout=dropout)
    optimization = Optimization(pipeline=pipeline, warmup=0, accumulate=accumulate)
    return run_two_steps(gpt_text.FAMILY.build("gpt", model, optimization, steps=10, seed=0), sizes)


@pytest.fixture(scope="module")
def one_device():
    return step({"data": 1})


def test_on_a_mesh(one_device):
    found = step(MESHES[2])
    check_same(found, one_device)
    stacked = found.completion.spec("state/params/blocks/mlp/w1")
    assert stacked[0] == "pipe"
    assert stacked[-1] == "tensor"


@pytest.mark.parametrize(
    "schedule", ["1f1b", *(pytest.param(each, marks=pytest.mark.slow) for each in ("terapipe", "zb-v"))]
)
def test_mpmd(schedule, one_device):
    check_same(step({"pipe": 2}, schedule, executor="mpmd"), one_device)


def test_default_executor():
    def suits(executor, sizes):
        pipeline = PipelineConfig(devices=2, schedule="1f1b", microbatches=4, executor=executor)
        workload = gpt_text.FAMILY.build("gpt", MODEL, Optimization(pipeline=pipeline), steps=10, seed=0)
        with sharding.mesh(sizes, devices=jax.devices()[: int(np.prod(list(sizes.values())))]) as mesh:
            return workload.mpmd_step.suits(mesh)

    assert suits(None, {"pipe": 2})
    assert not suits(None, {"pipe": 2, "data": 2})
    assert suits("mpmd", {"pipe": 2, "data": 2})
    assert not suits("spmd", {"pipe": 2})


@pytest.mark.slow
@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_on_every_mesh(schedule, sizes, one_device):
    check_same(step(sizes, schedule), one_device)


@pytest.mark.slow
def test_remat(one_device):
    check_same(step(MESHES[1], remat=True), one_device)


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "executor"), [(MESHES[0], "mpmd"), (MESHES[2], "spmd")], ids=str)
def test_dropout(sizes, executor):
    """Each microbatch has the key that it has under gradient accumulation on one device."""
    check_same(step(sizes, dropout=0.2, executor=executor), step({"data": 1}, dropout=0.2, accumulate=4))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--mesh pipe=2 --model bert-tiny", "which has no pipeline stages"),
        ("--mesh pipe=2 --schedule terapipe --dropout 0.1", "slices of a sequence get no random key"),
        ("--mesh data=2 --schedule gpipe", "a mesh with a pipe axis"),
        ("--mesh pipe=2 --accumulate 2", "--microbatches 2"),
        ("--mesh pipe=2 --batch 16 --microbatches 5", "microbatches=5 = 5 parts; 16 / 5 = 3.2"),
        ("--mesh pipe=4 --schedule zb-v", "4 blocks, 8 stages"),
        ("--mesh pipe=4,data=2 --schedule chimera --microbatches 2", "a multiple of 4"),
        ("--mesh pipe=2 --microbatches 0", "required: at least 1"),
        ("--mesh pipe=2 --slices 2", "--schedule terapipe"),
        ("--mesh pipe=2 --schedule terapipe --slices 3", "128 tokens, 3 slices"),
    ],
)
def test_invalid_pipelines(arguments, message, capsys):
    command = "train" if "--accumulate" in arguments else "explain"
    with pytest.raises(SystemExit, match="2"):
        main([command, *arguments.split()])
    assert message in capsys.readouterr().err


def test_default_slices():
    assert PipelineOptions(schedule="terapipe").resolve({"pipe": 4}).slices == 4
    assert PipelineOptions(schedule="terapipe", slices=2).resolve({"pipe": 4}).slices == 2


def test_default_microbatches():
    assert PipelineOptions().resolve({"pipe": 4, "data": 2}) == PipelineConfig(
        devices=4, schedule="1f1b", microbatches=8
    )
    assert PipelineOptions().resolve({"data": 2}) is None
    with pytest.raises(ShardingError, match="no pipe axis"):
        PipelineOptions(microbatches=2).resolve({"pipe": 1})
