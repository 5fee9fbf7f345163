"""Patches, class token and mean pooling of a vision transformer; its variants agree."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sharding.models import gpt, image_classifier, vit

SMALL = vit.Config(image=6, channels=2, patch=2, classes=5, layers=2, features=16, heads=4, mlp_features=32)


@functools.partial(jax.jit, static_argnums=0)
def _init(config):
    return vit.ViT(config, rngs=nnx.Rngs(0))


def _model(**changes):
    return _init(dataclasses.replace(SMALL, **changes))


def _images(batch=3):
    return jax.random.normal(jax.random.key(1), (batch, 6, 6, 2))


@jax.jit
def _value_and_grad(model, key=None):
    return jax.value_and_grad(lambda model: image_classifier.loss(model(_images(), key), jnp.array([0, 4, 2])))(model)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"pool": "mean"}, marks=pytest.mark.slow),
        {"dtype": "bfloat16", "scan": True},
    ],
)
def test_shapes(changes):
    logits = _model(**changes)(_images())
    assert logits.shape == (3, 5)
    assert logits.dtype == jnp.float32
    assert jnp.isfinite(logits).all()


@pytest.mark.parametrize("name, params", [("vit-tiny", 136_010), ("vit-b16", 86_567_656), ("vit-h14", 632_045_800)])
def test_preset_sizes_are_the_published_ones(name, params):
    model = jax.eval_shape(lambda: vit.ViT(vit.PRESETS[name], rngs=nnx.Rngs(0)))
    assert gpt.num_params(model) == params


def test_patches_one_by_one():
    pixels = np.asarray(_images())
    found = vit.patches(jnp.asarray(pixels), 2)
    assert found.shape == (3, 9, 8)
    for i in range(3):
        for j in range(3):
            expected = pixels[:, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2].reshape(3, -1)
            np.testing.assert_array_equal(found[:, 3 * i + j], expected)


def test_the_patch_embedding_is_a_convolution():
    model = _model(pool="mean")
    kernel = model.embed.w[...].reshape(2, 2, 2, 16)
    convolved = jax.lax.conv_general_dilated(
        _images(), kernel, (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    expected = convolved.reshape(3, 9, 16) + model.embed.positions[...][None]
    np.testing.assert_allclose(model.embed(_images()), expected, rtol=1e-5, atol=1e-5)


def test_the_head_reads_the_class_token():
    model = _model()
    model.embed.class_token[...] = jnp.arange(16.0)
    x = model.embed(_images())
    assert x.shape == (3, 10, 16)
    np.testing.assert_allclose(x[:, 0], jnp.broadcast_to(jnp.arange(16.0) + model.embed.positions[0], (3, 16)))

    def plain(x):
        for block in model.blocks:
            x = block(x)
        return model.final_norm(x)

    np.testing.assert_allclose(model(_images()), model.head(plain(x)[:, 0]), rtol=1e-5, atol=1e-5)


def test_mean_pooling_ignores_the_order_of_patches():
    model = _model(pool="mean")
    model.embed.positions[...] = jnp.zeros_like(model.embed.positions[...])
    rolled = jnp.roll(_images(), 2, axis=2)
    np.testing.assert_allclose(model(_images()), model(rolled), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"scan": True}, marks=pytest.mark.slow),
        pytest.param({"remat": True}, marks=pytest.mark.slow),
        {"scan": True, "remat": True},
    ],
    ids=str,
)
def test_forms_agree(changes):
    key = jax.random.key(3)
    value, grads = _value_and_grad(_model(dropout=0.2), key)
    other, other_grads = _value_and_grad(_model(dropout=0.2, **changes), key)
    np.testing.assert_allclose(value, other, rtol=1e-6)
    norms = [jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(tree))) for tree in (grads, other_grads)]
    np.testing.assert_allclose(*norms, rtol=1e-5)


def test_losses_are_cross_entropy_and_ignore_padding():
    logits, labels = jax.random.normal(jax.random.key(0), (6, 5)), jnp.array([0, 1, 2, 3, -1, -1])
    logits = logits.at[0, 0].set(9).at[1, 1].set(9)
    picked = jax.nn.log_softmax(logits)[jnp.arange(4), labels[:4]]
    np.testing.assert_allclose(image_classifier.loss(logits[:4], labels[:4]), -picked.mean(), rtol=1e-6)
    sums = image_classifier.sums(logits, labels)
    assert sums["count"] == 4
    assert sums["hits"] == sum(np.argmax(np.asarray(logits[:4]), axis=1) == np.arange(4)) >= 2
    np.testing.assert_allclose(sums["nats"], -picked.sum(), rtol=1e-6)


def test_images_of_a_wrong_shape_are_an_error():
    with pytest.raises(ValueError, match=r"images of shape \(8, 8, 1\), expected \(6, 6, 2\)"):
        _model()(jnp.zeros((1, 8, 8, 1)))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"patch": 4}, "image=6 must be a multiple of patch=4"),
        ({"pool": "max", "heads": 5}, "multiple of heads=5; pool='max' must be"),
        ({"classes": 0}, "classes=0 must be at least 1"),
    ],
)
def test_config_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **changes)
