"""A DLRM equals its published parts, and its tables are rows of one array that can be sharded."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import sharding
from sharding.launch.datasets import synthetic_clicks
from sharding.models import dlrm, gpt, layouts

SMALL = dlrm.Config(numbers=3, tables=(7, 2, 130), features=4, bottom=(5,), top=(6, 3))


@functools.partial(jax.jit, static_argnums=0)
def _init(config):
    return dlrm.DLRM(config, rngs=nnx.Rngs(0))


def _model(**changes):
    return _init(dataclasses.replace(SMALL, **changes))


def _batch(count=8):
    generator = np.random.default_rng(0)
    categories = np.stack([generator.integers(0, rows, count) for rows in SMALL.tables], axis=1).astype(np.int32)
    clicked = generator.integers(0, 2, count).astype(np.float32)
    return dlrm.Clicks(generator.standard_normal((count, 3)).astype(np.float32), categories, clicked)


def test_shapes():
    batch = _batch()
    for dtype in ("float32", "bfloat16"):
        logits = _model(dtype=dtype)(batch.numbers, batch.categories)
        assert logits.shape == (8,)
        assert logits.dtype == jnp.float32
    assert _model().tables.rows.shape == (256, 4)


@pytest.mark.parametrize("name, params", [("dlrm-tiny", 43_985), ("dlrm-large", 26.14e9)])
def test_preset_sizes(name, params):
    model = jax.eval_shape(lambda: dlrm.DLRM(dlrm.PRESETS[name], rngs=nnx.Rngs(0)))
    assert gpt.num_params(model) == pytest.approx(params, rel=1e-3)


def test_the_large_preset_is_that_of_mlperf():
    large = dlrm.PRESETS["dlrm-large"]
    assert (len(large.tables), sum(large.tables), max(large.tables)) == (26, 204_184_588, 40_000_000)
    assert not any(width % 128 for width in (large.features, *large.bottom, *large.top))  # what axis sizes divide


def test_interactions_pair_by_pair():
    vectors = np.asarray(jax.random.normal(jax.random.key(0), (5, 4, 3)))
    found = dlrm.interactions(jnp.asarray(vectors))
    assert found.shape == (5, 6)
    for example in range(5):
        pairs = [(i, j) for i, j in itertools.product(range(4), repeat=2) if j < i]
        expected = [sum(vectors[example, i, e] * vectors[example, j, e] for e in range(3)) for i, j in pairs]
        np.testing.assert_allclose(found[example], expected, rtol=1e-5)


def test_equals_a_numpy_reference():
    model, batch = _model(), _batch()
    tables = np.split(np.asarray(model.tables.rows[...], np.float64), [7, 9, 139])[:3]
    logits = model(batch.numbers, batch.categories)
    for example in range(8):
        x = batch.numbers[example].astype(np.float64)
        for layer in model.bottom:
            x = np.maximum(x @ np.asarray(layer.w[...]) + np.asarray(layer.bias[...]), 0)
        rows = [table[row] for table, row in zip(tables, batch.categories[example], strict=True)]
        vectors = [x, *rows]
        h = np.array([*x, *(vectors[i] @ vectors[j] for i in range(4) for j in range(i))])
        for layer in model.top:
            h = np.maximum(h @ np.asarray(layer.w[...]) + np.asarray(layer.bias[...]), 0)
        expected = h @ np.asarray(model.last.w[...])[:, 0] + model.last.bias[0]
        assert logits[example] == pytest.approx(float(expected), rel=1e-4, abs=1e-5)


def test_loss_is_the_log_loss():
    model, batch = _model(), _batch()
    share = 1 / (1 + np.exp(-np.asarray(model(batch.numbers, batch.categories), np.float64)))
    expected = -np.mean(np.where(batch.clicked > 0, np.log(share), np.log(1 - share)))
    assert float(dlrm.loss(model, batch)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.filterwarnings("ignore:.*XLA pads it")
@pytest.mark.parametrize("sizes", [{"tensor": 8}, {"data": 2, "fsdp": 2, "tensor": 2}], ids=str)
def test_sharded_tables_give_the_same_loss_and_gradients(sizes):
    model, batch = _model(), _batch()
    graph, params = nnx.split(model)

    def gradient(params, batch):
        def loss(params):
            return dlrm.loss(nnx.merge(graph, layouts.dlrm(sizes).annotate(params)), batch)

        return jax.value_and_grad(loss)(params)

    value, grads = jax.value_and_grad(dlrm.loss)(model, batch)
    with sharding.mesh(sizes):
        step = sharding.jit(gradient, in_shardings=(None, layouts.batch(sizes)))
        assert step.complete(params, batch).spec("tables/rows")[0] == "tensor"
        sharded_value, sharded_grads = jax.device_get(step(params, batch))
    assert float(sharded_value) == pytest.approx(float(value), rel=1e-6)
    for a, b in zip(jax.tree.leaves(sharded_grads), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_sharded_tables_are_never_all_gathered_over_tensor():
    sizes = {"data": 2, "tensor": 4}
    graph, params = nnx.split(_model(tables=(1000, 24)))
    batch = dataclasses.replace(_batch(), categories=_batch().categories[:, :2])

    def loss(params, batch):
        return dlrm.loss(nnx.merge(graph, layouts.dlrm(sizes).annotate(params)), batch)

    with sharding.mesh(sizes):
        f = sharding.jit(jax.value_and_grad(loss), in_shardings=(None, layouts.batch(sizes)))
        text = f.lower(params, batch).compile().as_text()
    assert "f32[256,4]" in text
    assert "f32[1024,4]" not in text


def test_auc_pair_by_pair():
    generator = np.random.default_rng(0)
    logits, clicked = generator.integers(0, 5, 40).astype(float), generator.integers(0, 2, 40).astype(float)
    pairs = [(a, b) for a in logits[clicked > 0] for b in logits[clicked == 0]]
    expected = np.mean([1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs])
    assert synthetic_clicks.auc(logits, clicked) == pytest.approx(expected)


def test_the_hidden_model_adds_up_values_and_pairs():
    hidden = synthetic_clicks.click_model(numbers=2, tables=(4, 3, 2000))
    numbers, categories = np.array([[0.5, -1.0]]), np.array([[3, 1, 1500]])
    rows = [3, 1, 500]
    vectors = [table[row] for table, row in zip(hidden.vectors, rows, strict=True)]
    expected = -1.0 + numbers[0] @ hidden.weights + sum(v[r] for v, r in zip(hidden.values, rows, strict=True))
    expected += sum(a @ b for a, b in itertools.combinations(vectors, 2))
    np.testing.assert_allclose(hidden.logits(numbers, categories), [expected])


def test_nothing_does_better_than_the_hidden_model():
    source = synthetic_clicks.make(numbers=4, tables=(50, 20), batch_size=256, seed=0)
    batches = source.heldout_batches()
    numbers, categories, clicked = (
        np.concatenate([getattr(batch, name) for batch in batches]) for name in ("numbers", "categories", "clicked")
    )
    logits = source.model.logits(numbers, categories)
    assert synthetic_clicks.log_loss(logits, clicked) == pytest.approx(source.best_nats, rel=1e-3)
    for worse in (logits * 1.3, logits * 0.7, logits + 0.2, logits - 0.2):
        assert synthetic_clicks.log_loss(worse, clicked) > source.best_nats
    shares = 1 / (1 + np.exp(-logits))
    entropy = -np.mean(shares * np.log(shares) + (1 - shares) * np.log(1 - shares))
    assert source.best_nats == pytest.approx(entropy, rel=0.02)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"tables": ()}, r"tables=\(\) must have at least one"),
        ({"numbers": 0, "top": (4, 0)}, r"numbers=0 must be at least 1; top=\(4, 0\) must be"),
        ({"dtype": "float16"}, "dtype='float16' must be"),
    ],
)
def test_config_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **changes)
