"""Batch, classifier head and metrics shared by the image classifiers ResNet and ViT.

Shape suffixes: B batch, I rows, J columns, C channels, F features, V classes.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .transformer import losses
from .transformer_layers import normal, zeros


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Labelled:
    """Labelled images: host or device arrays, or their ShapeDtypeStructs."""

    images: Any
    """[B, I, J, C]"""
    labels: Any
    """[B]; -1 marks padding, which metrics ignore."""


class Head(nnx.Module):
    """Linear classifier, x_BF -> logits_BV, float32."""

    def __init__(self, features: int, classes: int, *, rngs: nnx.Rngs):
        self.w = normal(rngs, (features, classes), fan_in=features)
        self.bias = zeros(classes)

    def __call__(self, x_BF: jax.Array) -> jax.Array:
        return jnp.einsum("BF,FV->BV", x_BF.astype(jnp.float32), self.w[...]) + self.bias[...][None, :]


def check_shape(model: str, images_BIJC: jax.Array, expected: tuple[int, int, int]) -> None:
    """Raises if the images do not have the shape that the model expects."""
    if images_BIJC.shape[1:] != expected:
        raise ValueError(f"{model}: images of shape {images_BIJC.shape[1:]}, expected {expected}")


def loss(logits_BV: jax.Array, labels_B: jax.Array) -> jax.Array:
    """Mean cross entropy in nats per image, padding included."""
    return jnp.mean(losses(logits_BV, labels_B))


def sums(logits_BV: jax.Array, labels_B: jax.Array) -> dict[str, jax.Array]:
    """Sums over images, without padding: cross entropy `nats`, correct predictions `hits`, and `count`."""
    valid_B = labels_B >= 0
    return {
        "nats": jnp.sum(jnp.where(valid_B, losses(logits_BV, labels_B), 0.0)),
        "hits": jnp.sum(jnp.argmax(logits_BV, axis=1).astype(labels_B.dtype) == labels_B),
        "count": jnp.sum(valid_B),
    }
