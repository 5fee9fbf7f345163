"""Steps with ZeRO equal those of one device, and the state is sharded over the axis data."""

import jax
import numpy as np
import pytest
from support.short_runs import check_same, run_two_steps

from sharding.launch import main
from sharding.launch.config.optimizer_config import Optimization
from sharding.launch.workloads import gpt_text
from sharding.models.gpt import Config

MODEL = Config(vocab=64, context=16, layers=2, features=32, heads=4, kv_heads=4, mlp_features=64)


def step(sizes, zero=0):
    return run_two_steps(
        gpt_text.FAMILY.build("gpt", MODEL, Optimization(zero=zero, warmup=0), steps=10, seed=0), sizes
    )


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


def test_an_axis_is_needed(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["train", "--mesh", "tensor=2", "--zero", "1", "--steps", "1"])
    assert "an axis data larger than 1" in capsys.readouterr().err
