"""PIX: random augmentations of each image before a residual net of Haiku, and metrics of a super-resolution net.

Shape suffixes: B images, Y X pixels, C channels.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import dm_pix as pix
import haiku as hk
import jax
import jax.numpy as jnp
import optax
from support.train_steps.step import Sizes, Step

from . import MakeProgram
from .common import KEY, floats, ints, largest_dim, replicated, training

PACKAGE = "dm-pix"


def augmented(key: jax.Array, image_YXC: jax.Array, crop: int) -> jax.Array:
    """A random crop, flip, rotation and color of an image."""
    keys = jax.random.split(key, 7)
    image_YXC = pix.random_crop(keys[0], image_YXC, (crop, crop, 3))
    image_YXC = pix.random_flip_left_right(keys[1], image_YXC)
    image_YXC = pix.rotate(image_YXC, jax.random.uniform(keys[2], minval=-0.3, maxval=0.3), mode="reflect")
    image_YXC = pix.random_brightness(keys[3], image_YXC, 0.2)
    image_YXC = pix.random_hue(keys[4], image_YXC, 0.1)
    image_YXC = pix.random_contrast(keys[5], image_YXC, 0.8, 1.2)
    image_YXC = pix.random_saturation(keys[6], image_YXC, 0.8, 1.2)
    return pix.gaussian_blur(image_YXC, 1.0, 5.0)


def classified(sizes: Sizes, *, rows: int, pixels: int, crop: int) -> Step:
    """The train step of a wide residual net with layer norms on augmented images."""

    def network(images: jax.Array) -> jax.Array:
        x = hk.Conv2D(64, 7, 2)(images)
        for stage, width in enumerate((64, 128, 256, 512)):
            for n in range(2):
                h = jax.nn.relu(hk.GroupNorm(32)(x))
                stride = 2 if stage and not n else 1
                skipped = hk.Conv2D(width, 1, stride)(h) if stride > 1 else x
                h = jax.nn.relu(hk.GroupNorm(32)(hk.Conv2D(width, 3, stride)(h)))
                x = skipped + hk.Conv2D(width, 3)(h)
        return hk.Linear(1000)(jax.nn.relu(x).mean((1, 2)))

    net = hk.without_apply_rng(hk.transform(network))
    params = jax.eval_shape(net.init, KEY, floats(rows, crop, crop, 3))

    def loss(params: Any, images: jax.Array, labels: jax.Array, key: jax.Array) -> jax.Array:
        seen = jax.vmap(partial(augmented, crop=crop))(jax.random.split(key, rows), images)
        return optax.softmax_cross_entropy_with_integer_labels(net.apply(params, seen), labels).mean()

    batch = floats(rows, pixels, pixels, 3), ints(rows), KEY
    return training(loss, params, batch, sizes, weights=replicated(params, sizes), optimizer=optax.lamb(1e-3))


def enlarged(sizes: Sizes, *, rows: int, pixels: int, factor: int) -> Step:
    """The train step of a super-resolution net for structural similarity and absolute error."""

    def network(images: jax.Array) -> jax.Array:
        x = first = hk.Conv2D(256, 3)(images)
        for _ in range(12):
            x = x + 0.1 * hk.Conv2D(256, 3)(jax.nn.relu(hk.Conv2D(256, 3)(x)))
        return pix.depth_to_space(hk.Conv2D(3 * factor**2, 3)(x + first), factor)

    net = hk.without_apply_rng(hk.transform(network))
    params = jax.eval_shape(net.init, KEY, floats(rows, pixels, pixels, 3))

    def loss(params: Any, small: jax.Array, large: jax.Array) -> jax.Array:
        made = net.apply(params, small)
        return jnp.mean(pix.mae(made, large) + 1 - pix.ssim(made, large))

    batch = floats(rows, pixels, pixels, 3), floats(rows, factor * pixels, factor * pixels, 3)
    return training(loss, params, batch, sizes, weights=largest_dim(params, sizes))


PROGRAMS: dict[str, MakeProgram] = {
    "augmented classifier": partial(classified, rows=128, pixels=256, crop=224),
    "super-resolution, fsdp": partial(enlarged, rows=16, pixels=96, factor=4),
}
