"""Models whose layers keep what fits: `--memory` of train, `--memory-budget` of explain."""

import dataclasses
import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from support.peak_memory import compiled_bytes
from support.short_runs import error_output, losses, train

import sharding
from sharding import ShardingError, launch, remat
from sharding.launch import jitted_workload, memory_budget
from sharding.launch.config.byte_size import parse_bytes
from sharding.launch.config.optimizer_config import Optimization
from sharding.launch.workloads import gpt_text
from sharding.models import dlrm, gpt


def explain(capsys, *args):
    launch.main(["explain", "--mesh", "data=2", *args])
    return capsys.readouterr().out


def refused(capsys, *args):
    with pytest.raises(SystemExit, match="2"):
        launch.main(["explain", "--mesh", "data=2", *args])
    return capsys.readouterr().err


def least_of(error):
    return int(re.search(r"fix: +memory_bytes=(\d+)", error)[1])


@pytest.mark.slow
def test_a_model_keeps_what_fits_and_the_compiled_step_runs(compiles):
    config = gpt.Config(
        vocab=32, context=16, layers=2, features=16, heads=2, kv_heads=2, mlp_features=32, scan=True, kernels="xla"
    )
    with sharding.mesh(data=2, devices=jax.devices()[:2]) as mesh:

        def step(model):
            workload = gpt_text.build("small", model, Optimization(), steps=4, seed=0)
            return jitted_workload.jit_step(workload, mesh), (workload.state_shapes, workload.batch_shapes(64))

        found, fitted = memory_budget.fit(config, step, 10**9)
        jitted, args = step(found)
        assert jitted.complete(*args).memory().peak_bytes == fitted.peak_bytes <= 10**9
        assert compiled_bytes(jitted.lower(*args)) == fitted.compiled_bytes <= 10**9

        workload = gpt_text.build("small", found, Optimization(), steps=4, seed=0)
        over = jitted_workload.jit_workload(workload, mesh, batch_size=64, step=fitted.step)
        state, batch = over.initial_state(0), over.put(np.zeros((64, 17), np.int32))
        before = len(compiles)
        jax.block_until_ready(over.train_step(state, batch))
        assert len(compiles) == before
    assert {value.name for value in fitted.values} == {"block_input", "qkv", "attention_out", "mlp_hidden"}


@pytest.mark.slow
def test_explain_says_what_a_budget_keeps_or_the_least_that_would_do(capsys):
    vit = ["--model", "vit-tiny", "--scan"]
    least = least_of(refused(capsys, *vit, "--memory-budget", "1kB"))
    shown = explain(capsys, *vit, "--memory-budget", str(least), "--memory")
    assert re.search(r"qkv +recompute .*transformer_layers.py:\d+", shown)
    assert "best programs by budget" in shown
    assert f"({least:,} bytes)" in shown  # of the memory report


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt-tiny", "bert-tiny"])
def test_a_run_within_a_budget_has_the_same_losses(model, capsys, tmp_path):
    expected = losses(train(tmp_path / "all", "--model", model, mesh="data=2"))
    least = least_of(error_output(capsys, "--model", model, "--mesh", "data=2", "--memory", "1"))
    found = train(tmp_path / "within", "--model", model, "--memory", str(least), mesh="data=2")
    assert "mlp_hidden" in capsys.readouterr().out
    np.testing.assert_allclose(losses(found), expected, rtol=1e-4)


@pytest.mark.parametrize(("keeps_everything", "recomputed"), [(True, ()), (False, (0, 1))])
def test_a_planned_model_recomputes_only_what_its_plan_says(keeps_everything, recomputed):
    config = gpt.Config(vocab=32, context=16, layers=2, features=16, heads=2, kv_heads=2, mlp_features=32)
    plan = SimpleNamespace(stages=None, keeps_everything=keeps_everything)
    chosen = memory_budget.as_planned(dataclasses.replace(config, remat=True), plan)
    assert chosen.remat == (tuple(remat.auto[group] for group in recomputed) or False)
    plain = dlrm.PRESETS["dlrm-tiny"]  # has nothing to recompute
    assert memory_budget.as_planned(plain, plan) == plain


@pytest.mark.parametrize(
    ("text", "number"), [("16GB", 16 * 10**9), ("15.5GiB", int(15.5 * 2**30)), ("800 mb", 800 * 10**6), ("123", 123)]
)
def test_sizes(text, number):
    assert parse_bytes("--memory", text) == number


@pytest.mark.parametrize("text", ["0GB", "-1GB", "16 gigabytes", "GB", ""])
def test_sizes_that_are_none(text):
    with pytest.raises(ShardingError, match="--memory 16GB"):
        parse_bytes("--memory", text)


def test_models_without_a_choice(capsys, tmp_path):
    assert "a model without recomputation" in refused(capsys, "--model", "resnet-tiny", "--memory-budget", "1GB")
    shown = error_output(capsys, "--mesh", "pipe=2,data=2", "--memory", "1GB", "--out", str(tmp_path))
    assert "a pipeline" in shown
