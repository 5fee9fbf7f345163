"""ResNets and vision transformers on handwritten digits: image classification."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from sharding.annotations.layout import Layout
from sharding.errors import ShardingError

from ...models import image_classifier, layouts, resnet, vit
from ..config.optimizer_config import Optimization
from ..config.train_config import Recipe
from ..datasets import digits
from ..train_step import train_functions
from ..workload import DeviceMetrics, EvalOutput, Metric, Workload
from .model_family import Family

LOSS = Metric(name="loss", unit="nats per image")
HELDOUT = (
    Metric(name="heldout_nats", unit="nats per image", final_digits=3),
    Metric(name="heldout_accuracy", unit="% right", scale=100, digits=1, final_digits=1),
)


def build_resnet(
    name: str, config: resnet.Config, optimization: Optimization, *, steps: int, seed: int, sample: int = 0
) -> Workload:
    """The workload of a ResNet on the digits."""

    def logits(model: resnet.ResNet, pixels: jax.Array, key: jax.Array | None, training: bool) -> jax.Array:
        return model(pixels, training=training)

    def make(rngs: nnx.Rngs) -> resnet.ResNet:
        return resnet.ResNet(config, rngs=rngs)

    return _build(name, config, optimization, make=make, logits=logits, layout=layouts.resnet, steps=steps, key=None)


def build_vit(
    name: str, config: vit.Config, optimization: Optimization, *, steps: int, seed: int, sample: int = 0
) -> Workload:
    """The workload of a vision transformer on the digits."""

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
    layout: Callable[[Any], Layout],
    steps: int,
    key: jax.Array | None,
) -> Workload:
    def loss(model: Any, batch: image_classifier.Labelled, key: jax.Array | None) -> jax.Array:
        return image_classifier.loss(logits(model, batch.images, key, True), batch.labels)

    init, train_step, merge, _ = train_functions(
        make, loss, layout=layout, optimization=optimization, steps=steps, key=key
    )

    def evaluate(params: nnx.State, variables: nnx.State, batch: image_classifier.Labelled) -> DeviceMetrics:
        return image_classifier.sums(logits(merge(params, variables), batch.images, None, False), batch.labels)

    def batch_shapes(size: int) -> image_classifier.Labelled:
        pixels = jax.ShapeDtypeStruct((size, config.image, config.image, config.channels), jnp.float32)
        labels = jax.ShapeDtypeStruct((size,), jnp.int32)
        return image_classifier.Labelled(pixels, labels)

    def source(batch_size: int, seed: int) -> digits.Digits:
        _check_fits(name, config)
        return digits.read(batch_size=batch_size, seed=seed)

    return Workload(
        name=name,
        config=config,
        summary=f"{config.image}x{config.image} pixels, {config.classes} classes",
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


def score(batches: Sequence[EvalOutput]) -> dict[str, float]:
    """Mean nats and accuracy, over images that are not padding."""
    nats, hits, count = (sum(float(output[name]) for output in batches) for name in ("nats", "hits", "count"))
    return {"heldout_nats": nats / count, "heldout_accuracy": hits / count}


def _check_fits(name: str, config: resnet.Config | vit.Config) -> None:
    if (config.image, config.channels, config.classes) != (digits.SIZE, 1, digits.NUM_CLASSES):
        raise ShardingError(
            f"train --model {name}",
            found=f"a model for {config.image}x{config.image} images of {config.classes} classes; the digits are "
            f"{digits.SIZE}x{digits.SIZE} of {digits.NUM_CLASSES} classes",
            required="the image size and classes of the bundled digits; larger presets can only be explained",
            fix=[f"--model {'resnet' if isinstance(config, resnet.Config) else 'vit'}-tiny", f"explain --model {name}"],
        )


def recipe(name: str) -> Recipe:
    """The default training settings of a classifier."""
    lr = 1e-2 if name.startswith("resnet") else 3e-3
    return Recipe(steps=300, batch=64, optimization=Optimization(lr=lr), eval_every=50, checkpoint_every=100)


RESNET = Family(presets=resnet.PRESETS, recipe=recipe, build=build_resnet)
VIT = Family(presets=vit.PRESETS, recipe=recipe, build=build_vit)
