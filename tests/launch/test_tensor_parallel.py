"""Steps with a sharded vocabulary and residual stream equal those of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.short_runs import check_same, error_output, run_two_steps

import sharding
from sharding.launch import tensor_parallel
from sharding.launch.commands import explain
from sharding.launch.config.explain_config import Explain
from sharding.launch.config.model_config import ModelOptions
from sharding.launch.config.optimizer_config import Optimization
from sharding.launch.config.pipeline_config import PipelineConfig
from sharding.launch.config.sequence_config import SequenceConfig
from sharding.launch.workloads import gpt_text
from sharding.models.gpt import Config

MODEL = Config(vocab=64, context=16, layers=2, features=32, heads=4, kv_heads=4, mlp_features=64)
BATCH = 16
PIPE = PipelineConfig(devices=2, schedule="1f1b", microbatches=2)


def two(sizes, **options):
    return run_two_steps(
        gpt_text.FAMILY.build("gpt", MODEL, Optimization(warmup=0, **options), steps=10, seed=0), sizes
    )


@pytest.fixture(scope="module")
def one_device():
    return two({"data": 1})


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"data": 2, "tensor": 4}, {"sequence_parallel": True}),
        pytest.param({"data": 2, "tensor": 4}, {}, marks=pytest.mark.slow),
        pytest.param({"data": 2, "fsdp": 2, "tensor": 2}, {"sequence_parallel": True}, marks=pytest.mark.slow),
        pytest.param({"data": 2, "tensor": 2}, {"sequence_parallel": True, "zero": 3}, marks=pytest.mark.slow),
    ],
)
def test_steps_are_those_of_one_device(sizes, options, one_device):
    found = two(sizes, **options)
    check_same(found, one_device)
    ledger = found.completion.communication()
    over = [c for c in ledger if c.axes == ("tensor",) and c.result_bytes > 4 * BATCH * MODEL.context]
    stream = 4 * BATCH // sizes["data"] // sizes.get("fsdp", 1) * MODEL.context * MODEL.features
    assert {c.result_bytes for c in over} == {stream}  # no table, no logits
    kinds = {"all-gather", "reduce-scatter"} if options else {"all-reduce"}
    assert {c.kind for c in over} == kinds
    assert sum(c.count for c in over if c.kind != "all-gather") == 4 * MODEL.layers + 2


@pytest.mark.slow
def test_beside_an_axis_of_sequences(one_device):
    sequence_config = SequenceConfig(devices=2, kind="ring")
    found = two({"data": 2, "tensor": 2, "seq": 2}, sequence_parallel=True, sequence=sequence_config)
    check_same(found, one_device)
    large = 4 * BATCH // 2 * MODEL.context // 2 * MODEL.features
    ledger = found.completion.communication()
    assert {c.axes for c in ledger if c.kind == "all-gather" and c.result_bytes >= large} == {("tensor",)}
    assert sum(c.count for c in ledger if c.kind == "reduce-scatter") == 4 * MODEL.layers + 2


@pytest.mark.slow
def test_stages_of_a_pipeline(one_device):
    found = two({"pipe": 2, "tensor": 2}, sequence_parallel=True, pipeline=PIPE)
    for ours, theirs in zip(found.metrics_per_step, one_device.metrics_per_step, strict=True):
        np.testing.assert_allclose(ours["loss"], theirs["loss"], rtol=1e-5)
        np.testing.assert_allclose(ours["gradient_norm"], theirs["gradient_norm"], rtol=1e-5)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_explain(is_sharded):
    asked = Explain(model=ModelOptions(scan=True), mesh="data=2,tensor=4", batch=8, sequence_parallel=is_sharded)
    kinds = explain.complete(asked).communication().by_kind()
    assert ("reduce-scatter" in kinds) == is_sharded


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--mesh", "data=2"], "an axis tensor larger than 1"),
        (["--mesh", "tensor=3"], "128 positions over tensor=3"),
        (["--model", "bert-tiny", "--mesh", "tensor=2"], "a model that supports sequence parallelism: one of gpt-tiny"),
    ],
)
def test_invalid_options(args, words, capsys):
    assert words in error_output(capsys, *args, "--sequence-parallel")


def test_lengths_that_the_axis_does_not_divide_stay_as_they_are():
    hooks = tensor_parallel.stream()
    with sharding.mesh(data=2, tensor=4):
        odd, even = (
            jax.make_jaxpr(lambda x: hooks.branch_output(hooks.branch_input(x)))(jnp.zeros((2, length, 8)))
            for length in (6, 12)
        )
    assert len(odd.eqns) == 0
    assert len(even.eqns) > 0
