"""One loss curve and one set of parameters, whatever the mesh."""

import jax
import numpy as np
import pytest

import sharding
from sharding.launch.config.optimizer_config import Optimization
from sharding.launch.workloads import gpt_text as family
from sharding.models import gpt, layouts

STEPS = 20
MESHES = [
    {"data": 8},
    {"fsdp": 8},
    {"tensor": 8},
    {"data": 2, "tensor": 4},
    {"data": 2, "fsdp": 2, "tensor": 2},
]


def train(model: gpt.Config, sizes: dict[str, int], steps: int = STEPS):
    """Losses of every step, and the parameters before and after, on the host."""
    workload = family.build("gpt", model, Optimization(), steps=steps, seed=0)
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    rng = np.random.default_rng(0)
    with sharding.mesh(sizes, devices=devices):
        batch = layouts.batch(sizes)
        step = sharding.jit(workload.train_step, donate_argnums=0, in_shardings=(None, batch))
        completion = step.complete(workload.state_shapes, workload.batch_shapes(8))
        state = sharding.jit(workload.init, out_shardings=completion.in_shardings[0])(jax.random.key(0))
        start = jax.tree.map(np.asarray, state.params)
        losses = []
        for _ in range(steps):
            tokens = rng.integers(0, model.vocab, (8, model.context + 1), dtype=np.int32)
            state, measured = step(state, sharding.put(tokens, batch))
            losses.append(float(measured["loss"]))
        assert completion.conflicts is not None
        return losses, start, jax.tree.map(np.asarray, state.params)


def config(**changes) -> gpt.Config:
    sizes = {"vocab": 64, "context": 16, "layers": 2, "features": 64, "heads": 8, "kv_heads": 8, "mlp_features": 128}
    return gpt.Config(**(sizes | changes))


def check(model: gpt.Config, meshes) -> None:
    losses, start, end = train(model, {"data": 1})
    assert losses[-1] != losses[0]
    for sizes in meshes:
        other_losses, other_start, other_end = train(model, sizes)
        np.testing.assert_allclose(other_losses, losses, rtol=1e-4, err_msg=str(sizes))
        for a, b in zip(jax.tree.leaves(start), jax.tree.leaves(other_start), strict=True):
            np.testing.assert_array_equal(a, b, err_msg=f"initial values on {sizes}")
        for a, b in zip(jax.tree.leaves(other_end), jax.tree.leaves(end), strict=True):
            assert np.linalg.norm(a - b) <= 1e-3 * np.linalg.norm(b), sizes


@pytest.mark.slow
def test_training_with_dropout_is_the_same_on_one_device_and_on_three_axes():
    check(config(dropout=0.1, scan=True, remat=True), MESHES[-1:])


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"dropout": 0.1}, {"scan": True, "remat": True, "dropout": 0.1}], ids=str)
def test_training_is_the_same_on_every_mesh(changes):
    check(config(**changes), MESHES)
