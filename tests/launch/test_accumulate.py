"""Gradient accumulation gives the step of the full batch."""

import dataclasses

import jax
import numpy as np
import pytest

import sharding
from sharding import ShardingError, checkpoint
from sharding.launch import batch_rows, jitted_workload, train_step, workloads
from sharding.launch.config.mesh_config import check_batch
from sharding.launch.config.model_config import ModelOptions
from sharding.launch.config.optimizer_config import Optimization
from sharding.launch.config.train_config import Train
from sharding.launch.workloads import gpt_text
from sharding.models.gpt import Config

MODEL = Config(vocab=64, context=16, layers=2, features=32, heads=4, kv_heads=4, mlp_features=64, scan=True)
MESHES = [{"data": 1}, {"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 4}, {"data": 4, "tensor": 2}]


def step(sizes: dict[str, int], accumulate: int, model: Config = MODEL):
    """Metrics of a step from the same state on the same batch, the parameters after it, and the completion."""
    # AdamW's first step hides the scale of gradients, so their norm is compared too.
    optimization = Optimization(accumulate=accumulate, warmup=0)
    workload = gpt_text.FAMILY.build("gpt", model, optimization, steps=10, seed=0)
    tokens = np.random.default_rng(0).integers(0, model.vocab, (16, model.context + 1), np.int32)
    with sharding.mesh(sizes, devices=jax.devices()[: int(np.prod(list(sizes.values())))]) as mesh:
        over = jitted_workload.jit_workload(workload, mesh, batch_size=16)
        state, measured = over.train_step(over.initial_state(0), over.put(tokens))
        return jax.device_get(measured), jax.device_get(state.params), over.completion


def check(sizes: dict[str, int], accumulate: int) -> None:
    measured, params, _ = step(sizes, 1)
    accumulated, accumulated_params, completion = step(sizes, accumulate)
    for name in measured:
        np.testing.assert_allclose(accumulated[name], measured[name], rtol=1e-5)
    for a, b in zip(jax.tree.leaves(accumulated_params), jax.tree.leaves(params), strict=True):
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b)
    axes = tuple(axis for axis in ("data", "fsdp") if sizes.get(axis, 1) > 1)
    if axes:
        spec = completion.spec("microbatches")
        assert spec[0] is None
        assert (spec[1] if isinstance(spec[1], tuple) else (spec[1],)) == axes


def test_on_a_mesh():
    check(MESHES[1], 4)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("accumulate", [2, 4])
def test_on_every_mesh(sizes: dict[str, int], accumulate: int):
    check(sizes, accumulate)


def test_gradients_of_a_plain_loss():
    # Without an optimizer; variables carry over between microbatches.
    def both(params, variables, batch, key):
        def value(params):
            error = batch["x"] @ params - batch["y"]
            return (error**2).mean(), (variables + 1, {"error": error.mean()})

        return jax.value_and_grad(value, has_aux=True)(params)

    rng = np.random.default_rng(0)
    params, batch = rng.normal(size=(5,)), {"x": rng.normal(size=(12, 5)), "y": rng.normal(size=12)}
    params, batch = jax.tree.map(lambda leaf: jax.numpy.asarray(leaf, jax.numpy.float32), (params, batch))
    (nats, (_, figures)), gradients = both(params, 0, batch, None)
    (accumulated, (count, accumulated_metrics)), accumulated_gradients = train_step.accumulate_gradients(both, 3)(
        params, 0, batch, None
    )
    np.testing.assert_allclose(accumulated, nats, rtol=1e-6)
    np.testing.assert_allclose(accumulated_gradients, gradients, rtol=1e-5)
    np.testing.assert_allclose(accumulated_metrics["error"], figures["error"], rtol=1e-5)
    assert count == 3


def test_every_row_is_in_one_microbatch():
    batch = np.arange(24).reshape(12, 2)
    parts = np.asarray(batch_rows.microbatches(jax.numpy.asarray(batch), 3))
    assert parts.shape == (3, 4, 2)
    assert sorted(map(tuple, parts.reshape(12, 2).tolist())) == sorted(map(tuple, batch.tolist()))


@pytest.mark.slow
def test_each_microbatch_has_its_own_dropout():
    model = dataclasses.replace(MODEL, dropout=0.5)
    first, again, full_batch = (step({"data": 1}, count, model)[0]["loss"] for count in (2, 2, 1))
    assert first == again != full_batch


@pytest.mark.parametrize(
    ("axes", "accumulate", "message"),
    [
        ({"data": 2, "fsdp": 2}, 3, r"data=2 \* fsdp=2 \* accumulate=3 = 12 parts; 16 / 12 = 1.33"),
        ({"tensor": 4}, 5, "--batch 15"),
        ({"data": 4}, 16, "--batch 64"),
    ],
)
def test_batches_that_do_not_divide(axes, accumulate, message):
    with pytest.raises(ShardingError, match=message):
        check_batch(16, axes, accumulate)


def test_options_are_checked_at_once():
    from sharding.launch.config.optimizer_config import OptimizationOptions

    with pytest.raises(ShardingError, match="--accumulate 3"):
        Train(batch=16, mesh="data=2", optimization=OptimizationOptions(accumulate=3))
    with pytest.raises(ShardingError, match="required: at least 1"):
        OptimizationOptions(accumulate=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert-tiny", "vit-tiny", "dlrm-tiny"])
def test_other_models(name: str):
    family, model = workloads.find(ModelOptions(name=name))
    found = []
    for accumulate in (1, 4):
        workload = family.build(name, model, Optimization(accumulate=accumulate), steps=10, seed=0)
        with sharding.mesh(data=2, tensor=2, devices=jax.devices()[:4]) as mesh:
            over = jitted_workload.jit_workload(workload, mesh, batch_size=16)
            batch = over.put(workload.source(16, 0).train_batch(0))
            state, measured = over.train_step(over.initial_state(0), batch)
            # The first moment is the clipped gradient times a constant. Parameters can't be compared: where a gradient
            # is zero up to rounding, as for a key's bias, AdamW's first step follows its sign.
            moments = [leaf for name, leaf in checkpoint.named_leaves(state).items() if "/mu/" in name]
            found.append(jax.device_get((measured, moments)))
    (measured, moments), (accumulated, accumulated_moments) = found
    full_batch = np.sqrt(sum(np.linalg.norm(leaf) ** 2 for leaf in moments))
    for figure in measured:
        np.testing.assert_allclose(accumulated[figure], measured[figure], rtol=1e-5, err_msg=figure)
    for a, b in zip(accumulated_moments, moments, strict=True):
        assert np.linalg.norm(a - b) <= 1e-5 * full_batch
