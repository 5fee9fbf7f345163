"""A batch in parts gives the step that it gives as a whole."""

import dataclasses

import jax
import numpy as np
import pytest

import sharding
from sharding import ShardingError, checkpoint
from sharding.launch import program, rows, tasks, training
from sharding.launch.config import ModelChoice, Optimization, Train, check_batch
from sharding.launch.tasks import gpt
from sharding.models.gpt import Config

MODEL = Config(vocab=64, context=16, layers=2, features=32, heads=4, kv_heads=4, mlp_features=64, scan=True)
MESHES = [{"data": 1}, {"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 4}, {"data": 4, "tensor": 2}]


def step(sizes: dict[str, int], accumulate: int, model: Config = MODEL):
    """Figures of a step from the same state on the same batch, the parameters after it, and the completion."""
    # Plain SGD would show gradients as they are; AdamW's first step hides their scale, so the norm is compared too.
    optimization = Optimization(accumulate=accumulate, warmup=0)
    task = gpt.FAMILY.build("gpt", model, optimization, steps=10, seed=0)
    tokens = np.random.default_rng(0).integers(0, model.vocab, (16, model.context + 1), np.int32)
    with sharding.mesh(sizes, devices=jax.devices()[: int(np.prod(list(sizes.values())))]) as mesh:
        over = program.over(task, mesh, batch_size=16)
        state, measured = over.train_step(over.initial_state(0), over.put(tokens))
        return jax.device_get(measured), jax.device_get(state.params), over.completion


def check(sizes: dict[str, int], accumulate: int) -> None:
    measured, params, _ = step(sizes, 1)
    parted, parted_params, completion = step(sizes, accumulate)
    for name in measured:
        np.testing.assert_allclose(parted[name], measured[name], rtol=1e-5)
    for a, b in zip(jax.tree.leaves(parted_params), jax.tree.leaves(params), strict=True):
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b)
    axes = tuple(axis for axis in ("data", "fsdp") if sizes.get(axis, 1) > 1)
    if axes:
        spec = completion.spec("microbatches")
        assert spec[0] is None
        assert (spec[1] if isinstance(spec[1], tuple) else (spec[1],)) == axes


def test_in_parts_on_a_mesh():
    check(MESHES[1], 4)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("accumulate", [2, 4])
def test_in_parts_on_every_mesh(sizes: dict[str, int], accumulate: int):
    check(sizes, accumulate)


def test_gradients_of_a_plain_loss():
    # No optimizer in between, and variables that pass from part to part.
    def both(params, variables, batch, key):
        def value(params):
            error = batch["x"] @ params - batch["y"]
            return (error**2).mean(), (variables + 1, {"error": error.mean()})

        return jax.value_and_grad(value, has_aux=True)(params)

    rng = np.random.default_rng(0)
    params, batch = rng.normal(size=(5,)), {"x": rng.normal(size=(12, 5)), "y": rng.normal(size=12)}
    params, batch = jax.tree.map(lambda leaf: jax.numpy.asarray(leaf, jax.numpy.float32), (params, batch))
    (nats, (_, figures)), gradients = both(params, 0, batch, None)
    (parted, (count, parted_figures)), parted_gradients = training.accumulated(both, 3)(params, 0, batch, None)
    np.testing.assert_allclose(parted, nats, rtol=1e-6)
    np.testing.assert_allclose(parted_gradients, gradients, rtol=1e-5)
    np.testing.assert_allclose(parted_figures["error"], figures["error"], rtol=1e-5)
    assert count == 3


def test_every_row_is_in_one_microbatch():
    batch = np.arange(24).reshape(12, 2)
    parts = np.asarray(rows.microbatches(jax.numpy.asarray(batch), 3))
    assert parts.shape == (3, 4, 2)
    assert sorted(map(tuple, parts.reshape(12, 2).tolist())) == sorted(map(tuple, batch.tolist()))


@pytest.mark.slow
def test_each_part_drops_out_other_activations():
    model = dataclasses.replace(MODEL, dropout=0.5)
    first, again, whole = (step({"data": 1}, count, model)[0]["loss"] for count in (2, 2, 1))
    assert first == again != whole


@pytest.mark.parametrize(
    ("axes", "accumulate", "message"),
    [
        ({"data": 2, "fsdp": 2}, 3, r"data=2 \* fsdp=2 \* accumulate=3 = 12 parts; 16 / 12 = 1.33"),
        ({"tensor": 4}, 5, "--batch 15"),
        ({"data": 4}, 16, "--batch 64"),
    ],
)
def test_parts_that_do_not_divide(axes, accumulate, message):
    with pytest.raises(ShardingError, match=message):
        check_batch(16, axes, accumulate)


def test_the_command_is_checked_at_once():
    from sharding.launch.config import OptimizationChoice

    with pytest.raises(ShardingError, match="--accumulate 3"):
        Train(batch=16, mesh="data=2", optimization=OptimizationChoice(accumulate=3))
    with pytest.raises(ShardingError, match="must be at least 1"):
        OptimizationChoice(accumulate=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert-tiny", "vit-tiny", "dlrm-tiny"])
def test_other_models_in_parts(name: str):
    family, model = tasks.find(ModelChoice(name=name))
    found = []
    for accumulate in (1, 4):
        task = family.build(name, model, Optimization(accumulate=accumulate), steps=10, seed=0)
        with sharding.mesh(data=2, tensor=2, devices=jax.devices()[:4]) as mesh:
            over = program.over(task, mesh, batch_size=16)
            batch = over.put(task.source(16, 0).train_batch(0))
            state, measured = over.train_step(over.initial_state(0), batch)
            # The first moment is the gradient, clipped, times a constant. The parameters would not do: where a gradient
            # is zero but for rounding, as that of a key's bias, AdamW's first step shows its sign.
            moments = [leaf for name, leaf in checkpoint.named_leaves(state).items() if "/mu/" in name]
            found.append(jax.device_get((measured, moments)))
    (measured, moments), (parted, parted_moments) = found
    whole = np.sqrt(sum(np.linalg.norm(leaf) ** 2 for leaf in moments))
    for figure in measured:
        np.testing.assert_allclose(parted[figure], measured[figure], rtol=1e-5, err_msg=figure)
    for a, b in zip(parted_moments, moments, strict=True):
        assert np.linalg.norm(a - b) <= 1e-5 * whole
