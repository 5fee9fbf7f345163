"""Steps with states over the axis data are steps of one device, and each device has its part."""

import jax
import numpy as np
import pytest

import sharding
from sharding.launch import main, program
from sharding.launch.config import Optimization
from sharding.launch.tasks import gpt
from sharding.models.gpt import Config

MODEL = Config(vocab=64, context=16, layers=2, features=32, heads=4, kv_heads=4, mlp_features=64)


def step(sizes, zero=0):
    """Figures of two steps, and the state after them."""
    task = gpt.FAMILY.build("gpt", MODEL, Optimization(zero=zero, warmup=0), steps=10, seed=0)
    tokens = np.random.default_rng(0).integers(0, MODEL.vocab, (2, 16, MODEL.context + 1), np.int32)
    with sharding.mesh(sizes, devices=jax.devices()[: int(np.prod(list(sizes.values())))]) as mesh:
        over = program.over(task, mesh, batch_size=16)
        state, found = over.initial_state(0), []
        for batch in tokens:
            state, measured = over.train_step(state, over.put(batch))
            found.append(jax.device_get(measured))
        return found, state


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
    found, state = step(sizes, zero)
    for ours, theirs in zip(found, one_device[0], strict=True):
        for name in theirs:
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-5)
    pairs = (jax.tree.leaves(jax.device_get(tree.params)) for tree in (state, one_device[1]))
    for a, b in zip(*pairs, strict=True):
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b)
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
    assert "the axis data" in capsys.readouterr().err
