"""Steps with ZeRO equal those of one device, and the state is sharded over the axis data."""

import dataclasses

import jax
import numpy as np
import pytest
from support.short_runs import check_same, losses, run_two_steps, train

import sharding
from sharding.launch import jitted_workload, main
from sharding.launch.config.optimizer_config import Optimization
from sharding.launch.workloads import gpt_text
from sharding.models.gpt import Config

MODEL = Config(vocab=64, context=16, layers=2, features=32, heads=4, kv_heads=4, mlp_features=64)


def step(sizes, zero=0, **options):
    optimization = Optimization(zero=zero, warmup=0, **options)
    return run_two_steps(gpt_text.FAMILY.build("gpt", MODEL, optimization, steps=10, seed=0), sizes)


@pytest.fixture(scope="module")
def one_device():
    return step({"data": 1})


def share(leaf):
    return leaf.addressable_shards[0].data.size / leaf.size


@pytest.mark.parametrize(
    ("zero", "sizes"),
    [
        pytest.param(1, {"data": 2, "tensor": 2}, marks=pytest.mark.slow),
        pytest.param(2, {"data": 4}, marks=pytest.mark.slow),
        (3, {"data": 2, "tensor": 2}),
        pytest.param(2, {"data": 2, "fsdp": 2, "tensor": 2}, marks=pytest.mark.slow),
    ],
)
def test_steps_are_those_of_one_device(zero, sizes, one_device):
    found = step(sizes, zero)
    check_same(found, one_device)
    state = found.state
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    assert len(moments) == 2 * len(jax.tree.leaves(state.params))
    for leaf in moments if zero < 3 else [*moments, *jax.tree.leaves(state.params)]:
        assert share(leaf) <= 1 / sizes["data"]
    matrix = state.params["blocks"][0]["mlp"]["w1"][...]
    others = np.prod([size for name, size in sizes.items() if name != "data"])
    assert share(matrix) == 1 / (others * (sizes["data"] if zero == 3 else 1))


@pytest.mark.slow
def test_steps_with_the_state_on_the_host_are_the_same_bit_for_bit():
    sizes = {"data": 2, "tensor": 2}
    expected, found = step(sizes, 1), step(sizes, 1, offload="host")
    for one, other in zip(jax.tree.leaves(expected.state), jax.tree.leaves(found.state), strict=True):
        np.testing.assert_array_equal(one, other)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(found.state.opt_state) if x.ndim} == {"pinned_host"}
    moments = sum(x.nbytes for x in jax.tree.leaves(expected.state.opt_state) if x.ndim)
    report = found.completion.memory()
    assert moments / 4 <= report.host.argument_bytes <= moments / 2
    assert expected.completion.memory().argument_bytes - report.argument_bytes == report.host.argument_bytes


@pytest.mark.slow
def test_a_run_with_the_state_on_the_host_resumes(tmp_path):
    options = ("--zero", "2", "--offload", "host", "--delay-after", "2")
    whole = train(tmp_path / "a", *options)
    train(tmp_path / "b", *options)
    again = train(tmp_path / "b", *options, "--resume", "--resume-step", "3")
    assert losses(again) == losses(whole)


@pytest.mark.slow
def test_a_step_that_is_not_finite_leaves_the_state_on_the_host_unchanged():
    workload = gpt_text.FAMILY.build("gpt", MODEL, Optimization(zero=1, offload="host"), steps=10, seed=0)

    def broken(state, batch):
        def times_nan(params):
            return jax.tree.map(lambda leaf: leaf * jax.numpy.nan, params)

        new, measured = workload.train_step(dataclasses.replace(state, params=times_nan(state.params)), batch)
        return new, measured

    with sharding.mesh(data=2, devices=jax.devices()[:2]) as mesh:
        over = jitted_workload.jit_workload(workload, mesh, batch_size=16)
        state = over.initial_state(0)
        batch = over.put(np.zeros((16, MODEL.context + 1), np.int32))
        before = jax.device_get(state.opt_state)
        after, measured = sharding.jit(broken)(state, batch)
    assert np.isnan(measured["loss"])
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(after.opt_state), before)


@pytest.mark.parametrize("option", [("--offload", "host"), ("--delay-after", "3")])
def test_options_of_zero_need_a_stage(capsys, option):
    with pytest.raises(SystemExit, match="2"):
        main(["train", "--mesh", "data=2", *option, "--steps", "1"])
    assert f"--zero 1 {' '.join(option)}" in capsys.readouterr().err


def test_an_axis_is_needed(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["train", "--mesh", "tensor=2", "--zero", "1", "--steps", "1"])
    assert "an axis data larger than 1" in capsys.readouterr().err
