"""What every model that names what is on an image has: labelled images, the layer that makes logits, the loss.

Shape suffixes: B batch, I rows, J columns, C channels, F features, V classes.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .transformer import losses, normal, zeros


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Labelled:
    """Images and what is on them: arrays on the host or the devices, or their shapes."""

    images: Any
    """[B, I, J, C]"""
    labels: Any
    """[B]; -1 fills a batch up and counts nowhere."""


class Head(nnx.Module):
    """x_BF -> logits_BV, float32."""

    def __init__(self, features: int, classes: int, *, rngs: nnx.Rngs):
        self.w = normal(rngs, (features, classes), fan_in=features)
        self.bias = zeros(classes)

    def __call__(self, x_BF: jax.Array) -> jax.Array:
        return jnp.einsum("BF,FV->BV", x_BF.astype(jnp.float32), self.w[...]) + self.bias[...][None, :]


def check_shape(model: str, images_BIJC: jax.Array, expected: tuple[int, int, int]) -> None:
    """Raise an error if the images are not of the shape that the model is for."""
    if images_BIJC.shape[1:] != expected:
        raise ValueError(f"{model}: images of shape {images_BIJC.shape[1:]}, the model is for {expected}")


def loss(logits_BV: jax.Array, labels_B: jax.Array) -> jax.Array:
    """Mean cross entropy in nats an image; every image counts."""
    return jnp.mean(losses(logits_BV, labels_B))


def sums(logits_BV: jax.Array, labels_B: jax.Array) -> dict[str, jax.Array]:
    """Of the images that count: `nats`, how many are named rightly as `hits`, how many there are as `count`."""
    counts_B = labels_B >= 0
    return {
        "nats": jnp.sum(jnp.where(counts_B, losses(logits_BV, labels_B), 0.0)),
        "hits": jnp.sum(jnp.argmax(logits_BV, axis=1).astype(labels_B.dtype) == labels_B),
        "count": jnp.sum(counts_B),
    }
