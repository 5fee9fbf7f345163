"""Equimo: vision transformers, convolutional and state-space networks for images, trained with dropout or serving."""

from __future__ import annotations

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from equimo.vision import models
from support.train_steps.step import Sizes, Step

from sharding import P

from . import MakeProgram
from .common import KEY, Rules, batch_specs, bfloat16, floats, ints, largest_dim, replicated, specs_by
from .equinox_models import equinox_step, is_shape

PACKAGE = "Equimo"


def train(sizes: Sizes, *, make: Any, rows: int, weights: Any, half: bool = False, image: int = 224) -> Step:
    """The train step of a classifier; every image has its own key for stochastic depth."""

    def loss(model: Any, images: jax.Array, labels: jax.Array, key: jax.Array) -> jax.Array:
        model, images = bfloat16((model, images)) if half else (model, images)
        keys = jax.random.split(key, len(images))
        logits = jax.vmap(lambda x, key: model(x, key=key, inference=False))(images, keys)
        return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()

    batch = floats(rows, 3, image, image), ints(rows), KEY
    return equinox_step(lambda key: make(num_classes=1000, key=key), loss, batch, sizes, weights)


def serve(sizes: Sizes, *, make: Any, rows: int, weights: Any, image: int) -> Step:
    """The outputs of a model in bfloat16."""
    made = eqx.filter_eval_shape(lambda key: make(key=key), KEY)
    arrays, static = eqx.partition(made, is_shape)
    arrays = jax.eval_shape(bfloat16, arrays)

    def run(images: jax.Array, arrays: Any, key: jax.Array) -> jax.Array:
        model = eqx.combine(arrays, static)
        return jax.vmap(lambda x: model(x, key=key, inference=True))(images)

    images = floats(rows, 3, image, image, dtype=jnp.bfloat16)
    return Step(run=run, args=(images, arrays, KEY), specs=(batch_specs(images, sizes), weights(arrays, sizes), None))


# Linear weights are [out, in].
MEGATRON: Rules = (
    ("*attn/qkv/weight", P("model", None)),
    ("*attn/proj/weight", P(None, "model")),
    ("*fc1/weight", P("model", None)),
    ("*fc1/bias", P("model")),
    ("*fc2/weight", P(None, "model")),
)
megatron = partial(specs_by, MEGATRON)

PROGRAMS: dict[str, MakeProgram] = {
    "vit-l, megatron": partial(train, make=models.vit_large_patch16_224, rows=64, weights=megatron, half=True),
    "vit-h, fsdp": partial(train, make=models.vit_huge_patch14_224, rows=8, weights=largest_dim),
    "dinov2-g, serving": partial(serve, make=models.dinov2_vitg14_reg, rows=64, weights=megatron, image=518),
    "convnext-b": partial(train, make=models.convnext_base, rows=32, weights=replicated),
}
