"""ResNets and vision transformers on handwritten digits: which digit an image shows."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from sharding.errors import ShardingError

from ...models import images, layouts, resnet, vit
from .. import digits
from ..config import Optimization, Recipe
from ..task import Figure, Looked, Measured, Task
from ..training import trained
from .family import Family

LOSS = Figure(name="loss", unit="nats per image")
HELDOUT = (
    Figure(name="heldout_nats", unit="nats per image", last_digits=3),
    Figure(name="heldout_accuracy", unit="% right", scale=100, digits=1, last_digits=1),
)


def build_resnet(
    name: str, config: resnet.Config, optimization: Optimization, *, steps: int, seed: int, sample: int = 0
) -> Task:
    """The task of training a ResNet on the digits."""

    def logits(model: resnet.ResNet, pixels: jax.Array, key: jax.Array | None, training: bool) -> jax.Array:
        return model(pixels, training=training)

    def make(rngs: nnx.Rngs) -> resnet.ResNet:
        return resnet.ResNet(config, rngs=rngs)

    return _build(name, config, optimization, make=make, logits=logits, layout=layouts.resnet, steps=steps, key=None)


def build_vit(
    name: str, config: vit.Config, optimization: Optimization, *, steps: int, seed: int, sample: int = 0
) -> Task:
    """The task of training a vision transformer on the digits."""

    def logits(model: vit.ViT, pixels: jax.Array, key: jax.Array | None, training: bool) -> jax.Array:
        return model(pixels, key)

    def make(rngs: nnx.Rngs) -> vit.ViT:
        return vit.ViT(config, rngs=rngs)

    key = jax.random.key(seed) if config.dropout else None
    return _build(name, config, optimization, make=make, logits=logits, layout=layouts.vit, steps=steps, key=key)


def _build(
    name: str,
    config: Any,
    optimization: Optimization,
    *,
    make: Callable[[nnx.Rngs], Any],
    logits: Callable[[Any, jax.Array, jax.Array | None, bool], jax.Array],
    layout: Callable[[Any], layouts.Layout],
    steps: int,
    key: jax.Array | None,
) -> Task:
    def loss(model: Any, batch: images.Labelled, key: jax.Array | None) -> jax.Array:
        return images.loss(logits(model, batch.images, key, True), batch.labels)

    init, train_step, merged, _ = trained(make, loss, layout=layout, optimization=optimization, steps=steps, key=key)

    def evaluate(params: nnx.State, variables: nnx.State, batch: images.Labelled) -> Measured:
        return images.sums(logits(merged(params, variables), batch.images, None, False), batch.labels)

    def batch_shapes(size: int) -> images.Labelled:
        pixels = jax.ShapeDtypeStruct((size, config.image, config.image, config.channels), jnp.float32)
        labels = jax.ShapeDtypeStruct((size,), jnp.int32)
        return images.Labelled(pixels, labels)

    def source(batch_size: int, seed: int) -> digits.Digits:
        _check_fits(name, config)
        return digits.read(batch_size=batch_size, seed=seed)

    return Task(
        name=name,
        config=config,
        about=f"{config.image}x{config.image} pixels, {config.classes} classes",
        init=init,
        train_step=train_step,
        evaluate=evaluate,
        score=score,
        batch_shapes=batch_shapes,
        source=source,
        loss=LOSS,
        heldout=HELDOUT,
        item="images",
    )


def score(batches: Sequence[Looked]) -> dict[str, float]:
    """Mean nats and the share named rightly, over the images that count."""
    nats, hits, count = (sum(float(looked[name]) for looked in batches) for name in ("nats", "hits", "count"))
    return {"heldout_nats": nats / count, "heldout_accuracy": hits / count}


def _check_fits(name: str, config: resnet.Config | vit.Config) -> None:
    if (config.image, config.channels, config.classes) != (digits.SIZE, 1, digits.NUM_CLASSES):
        raise ShardingError(
            f"train --model {name}",
            there=f"a model for {config.image}x{config.image} images of {config.classes} classes, and the digits, "
            f"{digits.SIZE}x{digits.SIZE} of {digits.NUM_CLASSES}",
            must="images of the model's size are not among the data that come along; it can be explained",
            fix=[f"--model {'resnet' if isinstance(config, resnet.Config) else 'vit'}-tiny", f"explain --model {name}"],
        )


def recipe(name: str) -> Recipe:
    """How a classifier is trained by default."""
    lr = 1e-2 if name.startswith("resnet") else 3e-3
    return Recipe(steps=300, batch=64, optimization=Optimization(lr=lr), eval_every=50, checkpoint_every=100)


RESNET = Family(presets=resnet.PRESETS, recipe=recipe, build=build_resnet)
VIT = Family(presets=vit.PRESETS, recipe=recipe, build=build_vit)
