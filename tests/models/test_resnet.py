"""A ResNet has its published sizes and textbook convolutions, and batch norm is over the global batch."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import sharding
from sharding import P
from sharding.models import gpt, image_classifier, resnet

SMALL = resnet.Config(image=8, channels=2, classes=5, stages=(1, 1), width=4, stem="small")


@functools.partial(jax.jit, static_argnums=0)
def _init(config):
    return resnet.ResNet(config, rngs=nnx.Rngs(0))


def _model(**changes):
    return _init(dataclasses.replace(SMALL, **changes))


def _images(batch=4, size=8):
    return jax.random.normal(jax.random.key(1), (batch, size, size, 2))


@functools.partial(jax.jit, static_argnames="training")
def _call(model, pixels, training=False):
    logits = model(pixels, training=training)
    return logits, model


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"block": "bottleneck"}, marks=pytest.mark.slow),
        pytest.param({"stem": "large", "stages": (2, 1)}, marks=pytest.mark.slow),
        {"dtype": "bfloat16"},
    ],
    ids=str,
)
def test_shapes(changes):
    logits, _ = _call(_model(**changes), _images())
    assert logits.shape == (4, 5)
    assert logits.dtype == jnp.float32
    assert jnp.isfinite(logits).all()


@pytest.mark.parametrize(
    "name, params", [("resnet-tiny", 19_706), ("resnet-18", 11_689_512), ("resnet-50", 25_557_032)]
)
def test_preset_sizes_are_the_published_ones(name, params):
    model = jax.eval_shape(lambda: resnet.ResNet(resnet.PRESETS[name], rngs=nnx.Rngs(0)))
    assert gpt.num_params(model) == params


def _convolved(x, kernel, stride):
    """One output pixel at a time, in float64."""
    x, kernel = np.asarray(x, np.float64), np.asarray(kernel, np.float64)
    reach, size = kernel.shape[0] // 2, kernel.shape[0]
    padded = np.pad(x, ((0, 0), (reach, reach), (reach, reach), (0, 0)))
    rows = (x.shape[1] + 2 * reach - size) // stride + 1
    out = np.zeros((x.shape[0], rows, rows, kernel.shape[3]))
    for i in range(rows):
        for j in range(rows):
            window = padded[:, i * stride : i * stride + size, j * stride : j * stride + size]
            out[:, i, j] = np.einsum("bijc,ijcd->bd", window, kernel)
    return out


def _normed(x, norm):
    mean, var = x.mean(axis=(0, 1, 2)), x.var(axis=(0, 1, 2))
    return (x - mean) / np.sqrt(var + 1e-5) * np.asarray(norm.scale[...]) + np.asarray(norm.bias[...])


@pytest.mark.parametrize("block", ["basic", "bottleneck"])
def test_equals_a_numpy_reference(block):
    model = _model(block=block)
    # The last norm of a block starts at zero, which would hide the layers before it.
    for each in model.blocks:
        each.norm2.scale[...] = each.norm2.scale[...] + 0.7
    x = np.maximum(_normed(_convolved(_images(), model.stem.kernel[...], 1), model.stem_norm), 0)
    for i, each in enumerate(model.blocks):
        stride, h = 1 + i, x
        if each.narrow is not None:
            h = np.maximum(_normed(_convolved(h, each.narrow.kernel[...], 1), each.narrow_norm), 0)
        h = np.maximum(_normed(_convolved(h, each.conv1.kernel[...], stride), each.norm1), 0)
        h = _normed(_convolved(h, each.conv2.kernel[...], 1), each.norm2)
        if each.shortcut is not None:
            x = _normed(_convolved(x, each.shortcut.kernel[...], stride), each.shortcut_norm)
        x = np.maximum(x + h, 0)
    expected = x.mean(axis=(1, 2)) @ np.asarray(model.head.w[...]) + np.asarray(model.head.bias[...])
    logits, _ = _call(model, _images(), training=True)
    np.testing.assert_allclose(logits, expected, rtol=1e-3, atol=1e-4)


def test_the_max_pool_ignores_padding():
    x = _images(size=7)
    padded = np.pad(np.asarray(x), ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=-np.inf)
    found = resnet._maximum(x)
    assert found.shape == (4, 4, 4, 2)
    for i in range(4):
        for j in range(4):
            window = padded[:, 2 * i : 2 * i + 3, 2 * j : 2 * j + 3]
            np.testing.assert_array_equal(found[:, i, j], window.max(axis=(1, 2)))


def test_a_block_starts_as_its_shortcut():
    model = _model(stages=(1,))
    x = jax.nn.relu(jax.random.normal(jax.random.key(2), (4, 8, 8, 4)))
    np.testing.assert_array_equal(model.blocks[0](x, training=True), x)


def test_running_averages_follow_the_batch():
    model = _model()
    convolved = _convolved(_images(), model.stem.kernel[...], 1)
    _, after = _call(model, _images(), training=True)
    expected = 0.1 * convolved.mean(axis=(0, 1, 2))
    np.testing.assert_allclose(after.stem_norm.mean[...], expected, rtol=1e-4, atol=1e-5)
    expected = 0.9 + 0.1 * convolved.var(axis=(0, 1, 2))
    np.testing.assert_allclose(after.stem_norm.var[...], expected, rtol=1e-4)
    _, same = _call(model, _images())
    np.testing.assert_array_equal(same.stem_norm.mean[...], model.stem_norm.mean[...])


def test_batch_statistics_are_global_on_any_mesh():
    # Shards of the batch have different means, so per-shard statistics would differ.
    pixels = _images(8) + jnp.arange(8.0)[:, None, None, None]
    graph, state = nnx.split(_model(stages=(1,)))
    alone, model = _call(nnx.merge(graph, state), pixels, training=True)

    @sharding.jit(in_shardings=(None, P("data")))
    def call(state, pixels):
        model = nnx.merge(graph, state)
        return model(pixels, training=True), nnx.state(model)

    with sharding.mesh(data=8):
        logits, after = jax.device_get(call(state, pixels))
    np.testing.assert_allclose(logits, alone, rtol=1e-4, atol=1e-5)
    for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(nnx.state(model)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_gradients_reach_every_parameter():
    model = _model()
    for each in model.blocks:
        each.norm2.scale[...] = each.norm2.scale[...] + 0.5
    graph, params, variables = nnx.split(model, nnx.Param, ...)

    def loss(params):
        model = nnx.merge(graph, params, jax.tree.map(lambda x: x, variables))
        return image_classifier.loss(model(_images(), training=True), jnp.array([0, 1, 2, 3]))

    for path, leaf in jax.tree_util.tree_leaves_with_path(jax.grad(loss)(params)):
        assert jnp.abs(leaf).max() > 0, path


def test_images_of_a_wrong_shape_are_an_error():
    with pytest.raises(ValueError, match=r"images of shape \(9, 9, 2\), expected \(8, 8, 2\)"):
        _model()(_images(size=9))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"stages": ()}, r"stages=\(\) must be numbers"),
        ({"width": 0, "block": "dense"}, "width=0 must be at least 1; block='dense' must be"),
        ({"stem": "none", "momentum": 1.0}, "stem='none' must be .*; momentum=1.0 must be"),
        ({"dtype": "float16"}, "dtype='float16' must be"),
    ],
)
def test_config_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **changes)


@pytest.mark.parametrize("block", ["basic", "bottleneck"])
def test_outside_of_training_an_image_is_classified_alone(block):
    model = _model(block=block)
    for _ in range(2):
        model = _call(model, _images(), training=True)[1]
    together, after = _call(model, _images())
    alone, _ = _call(model, _images()[1:2])
    np.testing.assert_allclose(together[1:2], alone, rtol=1e-4, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(after), nnx.state(model))
    trained = _call(model, _images(), training=True)[0]
    assert np.abs(trained[1:2] - _call(model, _images()[1:2], training=True)[0]).max() > 1e-3
