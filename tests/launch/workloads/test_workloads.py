"""Every model of the command line: its data, its training, and equal results on every mesh."""

import dataclasses
import sys
from typing import Any

import jax
import numpy as np
import pytest

import sharding
from sharding import launch
from sharding.launch import jitted_workload, metrics, workloads
from sharding.launch.commands import explain
from sharding.launch.config import explain_config, mesh_config, train_config
from sharding.launch.config.model_config import ModelOptions
from sharding.launch.datasets import digits
from sharding.launch.workload import DataSource, Workload

TINY = ["bert-tiny", "resnet-tiny", "vit-tiny", "dlrm-tiny"]
SMALLER: dict[str, dict[str, Any]] = {
    "bert-tiny": {"layers": 1, "context": 16, "features": 32},
    "vit-tiny": {"layers": 1, "features": 32},
    "resnet-tiny": {"stages": (1,), "width": 8},
    "dlrm-tiny": {"tables": (40, 20, 10), "bottom": (16,), "top": (16,)},
}
MESHES = [{"data": 4}, {"data": 2, "tensor": 2}, {"data": 2, "fsdp": 2, "tensor": 2}]
BATCH = 16


def workload_of(name: str, changes: dict[str, Any] | None = None) -> Workload:
    family, preset = workloads.find(ModelOptions(name=name))
    changed = dataclasses.replace(preset, **(changes or {}))
    return family.build(name, changed, family.recipe(name).optimization, steps=20, seed=0)


def curve(workload: Workload, source: DataSource, sizes: dict[str, int], *, steps: int, start: Any = None):
    """Losses of `steps` steps from `start` or the initial state, the jitted workload and the final state."""
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    with sharding.mesh(sizes, devices=devices) as mesh:
        jitted = jitted_workload.jit_workload(workload, mesh, batch_size=BATCH)
        places = jax.tree.map(lambda leaf: leaf.sharding, jitted.abstract_state())
        state, losses = jitted.initial_state(0) if start is None else jax.device_put(start, places), []
        for step in range(steps):
            state, measured = jitted.train_step(state, jitted.put(source.train_batch(step)))
            losses.append(float(measured["loss"]))
        return losses, jitted, state


def same_variables(state, other) -> None:
    for a, b in zip(jax.tree.leaves(other.variables), jax.tree.leaves(state.variables), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert np.linalg.norm(a - b) <= 1e-3 * np.linalg.norm(b)


@pytest.mark.parametrize(
    "name", ["resnet-tiny", "dlrm-tiny", *(pytest.param(n, marks=pytest.mark.slow) for n in ("bert-tiny", "vit-tiny"))]
)
def test_a_small_model_learns_the_same_on_three_axes(name: str):
    workload = workload_of(name, SMALLER[name])
    source, start = workload.source(BATCH, 0), jax.device_get(jax.jit(workload.init)(jax.random.key(0)))
    losses, _, state = curve(workload, source, {"data": 1}, steps=3, start=start)
    others, _, other = curve(workload, source, MESHES[-1], steps=3, start=start)
    assert len(set(losses)) == 3
    np.testing.assert_allclose(others, losses, rtol=1e-4)
    same_variables(state, other)


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_every_mesh_learns_the_same(name: str):
    workload = workload_of(name)
    source, first = workload.source(BATCH, 0), workload.heldout[0].name
    losses, jitted, state = curve(workload, source, {"data": 1}, steps=20)
    heldout = score(jitted, state, source)
    assert np.mean(losses[10:]) < losses[0]  # single batches of clicks are noisy
    for sizes in MESHES:
        others, jitted, other = curve(workload, source, sizes, steps=20)
        np.testing.assert_allclose(others, losses, rtol=1e-4, err_msg=str(sizes))
        assert score(jitted, other, source)[first] == pytest.approx(heldout[first], rel=1e-3)
        same_variables(state, other)


def score(jitted: jitted_workload.JittedWorkload, state, source: DataSource) -> dict[str, float]:
    with jax.set_mesh(jitted.mesh):
        return jitted.heldout(state, source.heldout_batches()[:2])


# The table of notebooks/07_command_line.ipynb, with tolerance for another machine's rounding. Guessing bytes by
# frequency costs 4.6 bits; the clicks' own model has 0.4695 nats and an AUC of 0.8187.
FIGURES = {
    "bert-tiny": {"heldout_bits_per_hidden_byte": (0.0, 3.5)},
    "resnet-tiny": {"heldout_accuracy": (0.97, 1.0)},
    "vit-tiny": {"heldout_accuracy": (0.95, 1.0)},
    "dlrm-tiny": {"heldout_nats": (0.4690, 0.4820), "heldout_auc": (0.805, 0.819)},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_final_metrics(name: str, tmp_path):
    launch.main(["train", "--model", name, "--mesh", "data=2", "--out", str(tmp_path)])
    lines = metrics.read(tmp_path / metrics.FILE_NAME)
    for figure, (low, high) in FIGURES[name].items():
        assert low <= metrics.series(lines, figure)[-1][1] <= high, figure


@pytest.mark.parametrize("name", ["gpt-tiny", *TINY])
def test_batches_depend_on_seed_and_step_alone(name: str):
    workload = workload_of(name)
    one, again, other = workload.source(8, 3), workload.source(8, 3), workload.source(8, 4)
    assert one.sha256 == again.sha256 == other.sha256
    first = jax.tree.leaves(one.train_batch(7))
    for a, b in zip(first, jax.tree.leaves(again.train_batch(7)), strict=True):
        np.testing.assert_array_equal(a, b)
    for different in (one.train_batch(8), other.train_batch(7)):
        assert any((a != b).any() for a, b in zip(first, jax.tree.leaves(different), strict=True))
    for a, b in zip(jax.tree.leaves(one.heldout_batches()), jax.tree.leaves(other.heldout_batches()), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", ["gpt-tiny", *TINY])
def test_final_figures_are_no_finer_than_those_of_steps(name: str):
    workload = workload_of(name)
    assert all(metric.final_digits <= metric.digits for metric in (workload.loss, *workload.heldout))


@pytest.mark.parametrize("name", ["gpt-tiny", *TINY])
def test_rows_of_a_batch(name: str):
    source, rows = workload_of(name).source(8, 0), np.array([1, 2, 6])
    for part, whole in zip(
        jax.tree.leaves(source.train_batch(3, rows)), jax.tree.leaves(source.train_batch(3)), strict=True
    ):
        np.testing.assert_array_equal(part, whole[rows])


@pytest.mark.parametrize("name", ["gpt-tiny", *TINY])
def test_batch_shapes(name: str):
    workload = workload_of(name)
    source, expected = workload.source(8, 0), workload.batch_shapes(8)
    for batch in (source.train_batch(0), source.heldout_batches()[-1]):
        found = jax.tree.map(lambda x: (x.shape, x.dtype), batch)
        assert found == jax.tree.map(lambda x: (x.shape, x.dtype), expected)


def test_masked_bytes():
    source = workload_of("bert-tiny").source(400, 0)
    batch = source.train_batch(0)
    shown = np.take_along_axis(batch.tokens, batch.positions, axis=1)
    assert batch.positions.shape == (400, 19)
    assert (np.diff(batch.positions, axis=1) > 0).all()
    assert np.mean(shown == 256) == pytest.approx(0.8, abs=0.02)
    assert np.mean(shown == batch.targets) == pytest.approx(0.1, abs=0.02)
    assert batch.targets.max() < 256
    # Unmasked text is that of the corpus.
    whole = batch.tokens.copy()
    np.put_along_axis(whole, batch.positions, batch.targets, axis=1)
    assert whole[0].astype(np.uint8).tobytes() in source.corpus.train.tobytes()
    assert (whole != batch.tokens).sum() == (shown != batch.targets).sum()


def test_bytes_are_masked_anew_in_each_step_and_alike_in_each_evaluation():
    source = workload_of("bert-tiny").source(8, 0)
    first, second = (source.train_batch(step).positions for step in (0, 1))
    assert (first != second).any() and (source.train_batch(0).positions == first).all()
    heldout, again = source.heldout_batches(), source.heldout_batches()
    assert len(heldout) > 1 and (heldout[0].positions != heldout[1].positions).any()
    jax.tree.map(np.testing.assert_array_equal, heldout, again)
    rows = source.train_batch(0, np.asarray([2, 5]))
    np.testing.assert_array_equal(rows.positions, first[[2, 5]])


def test_an_epoch_has_each_digit_once():
    source = digits.read(batch_size=479, seed=0)
    assert len(source.train.labels) == 3 * 479
    epoch = np.concatenate([source.train_batch(step).images for step in range(3)])
    assert sorted(image.tobytes() for image in epoch) == sorted(image.tobytes() for image in source.train.images)
    other = np.concatenate([source.train_batch(step).images for step in range(3, 6)])
    assert (other != epoch).any()


def test_digits_held_out_are_counted_once():
    batches = digits.read(batch_size=64, seed=0).heldout_batches()
    labels = np.concatenate([batch.labels for batch in batches])
    assert {len(batch.labels) for batch in batches} == {64}
    assert (labels >= 0).sum() == digits.NUM_HELDOUT
    assert (labels[digits.NUM_HELDOUT :] == -1).all()


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    with pytest.raises(SystemExit, match="2"):
        launch.main([*args])
    return capsys.readouterr().err


@pytest.mark.parametrize("name", TINY)
def test_mistakes(name: str, capsys, tmp_path):
    train = ["train", "--model", name, "--out", str(tmp_path)]
    near = refused(capsys, "train", "--model", name[:-1], "--out", str(tmp_path))
    assert f"--model {name}" in near
    assert "'model'" in refused(capsys, *train, "--mesh", "model=2")
    assert "4 parts; 6 / 4 = 1.5" in refused(capsys, *train, "--mesh", "data=4", "--batch", "6")
    assert "leave --kv-heads out" in refused(capsys, *train, "--kv-heads", "2")
    assert "this model is not generative" in refused(capsys, *train, "--sample", "5")


def test_the_recipe_s_batch_must_divide_too(capsys, tmp_path):
    shown = refused(capsys, "train", "--model", "vit-tiny", "--mesh", "data=3", "--out", str(tmp_path))
    assert "--batch 64" in shown and "--batch 63" in shown


def test_no_data_for_a_large_model(capsys, tmp_path):
    shown = refused(capsys, "train", "--model", "resnet-50", "--out", str(tmp_path))
    assert "224x224" in shown and "--model resnet-tiny" in shown


def test_images_need_scikit_learn(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    shown = refused(capsys, "train", "--model", "resnet-tiny", "--out", str(tmp_path))
    assert "pip install 'sharding-jax[data]'" in shown


SHOWN = {
    "bert-base": ("blocks/0/attention/qkv", "blocks/*/attention/qkv (x12) 768x12x3x64 [fsdp, tensor, -, -] annotated"),
    "vit-b16": ("blocks/11/mlp/w1", "blocks/*/mlp/w1 (x12) 768x3072 [fsdp, tensor] annotated"),
    "resnet-50": ("blocks/0/conv1/kernel", "blocks/*/conv1/kernel (x3) 3x3x64x64 [-, -, fsdp, tensor] annotated"),
    "dlrm-large": ("tables/rows", "tables/rows 204184704x128 [tensor, fsdp] annotated"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in ("vit-b16", "dlrm-large"))) for n in SHOWN]
)
def test_large_models_are_explained(name: str):
    path, row = SHOWN[name]
    asked = explain_config.Explain(model=ModelOptions(name=name), mesh="data=4,fsdp=4,tensor=4", devices="v5p:4x4x4")
    completion = explain.complete(asked)
    assert f"state/params/{row}" in " ".join(str(completion).split())
    assert "annotate" in str(completion.why(f"state/params/{path}"))
    assert not completion.unknown


def test_every_default_batch_fits_the_default_mesh():
    for name, family in workloads.PRESETS.items():
        mesh_config.check_batch(family.recipe(name).batch, mesh_config.parse_mesh(train_config.Train().mesh))
