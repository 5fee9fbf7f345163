"""Haiku: its networks for images (ResNet, MobileNet, vector quantization) and convolutional LSTMs for video."""

from __future__ import annotations

from functools import partial
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import optax
from support.train_steps.step import Sizes, Step

from . import MakeProgram
from .common import KEY, batch_specs, bfloat16, floats, ints, largest_dim, replicated, training
from .haiku_models import cross_entropy

PACKAGE = "dm-haiku"


def video(sizes: Sizes) -> Step:
    """The train step of two convolutional LSTMs that predict the next frame."""

    def forward(frames: jax.Array) -> jax.Array:
        cells = [hk.Conv2DLSTM((64, 64), 256, 3), hk.Conv2DLSTM((64, 64), 256, 3)]
        core = hk.DeepRNN([*cells, hk.Conv2D(1, 1)])
        return hk.dynamic_unroll(core, frames[:, :-1], core.initial_state(len(frames)), time_major=False)[0]

    model = hk.without_apply_rng(hk.transform(forward))
    frames = floats(8, 20, 64, 64, 1)
    params = jax.eval_shape(model.init, KEY, frames)
    return training(lambda p, x: jnp.mean((model.apply(p, x) - x[:, 1:]) ** 2), params, (frames,), sizes)


def with_state(forward: Any, loss: Any, batch: tuple[Any, ...], sizes: Sizes, weights: Any, optimizer: Any) -> Step:
    """The train step of a network with moving averages: `loss` is of (its output, *batch)."""
    model = hk.transform_with_state(forward)
    params, averages = jax.eval_shape(model.init, KEY, batch[0])

    def run(state: Any, *batch: Any) -> Any:
        params, averages, optimizer_state = state

        def value(params: Any) -> Any:
            output, new = model.apply(params, averages, None, batch[0])
            return loss(output, *batch), new

        (mean, averages), gradient = jax.value_and_grad(value, has_aux=True)(params)
        updates, optimizer_state = optimizer.update(gradient, optimizer_state, params)
        return (optax.apply_updates(params, updates), averages, optimizer_state), mean

    state = params, averages, jax.eval_shape(optimizer.init, params)
    return Step(run=run, args=(state, *batch), specs=((weights(params, sizes), None, None), *batch_specs(batch, sizes)))


def classifier(sizes: Sizes, *, network: Any, rows: int, weights: Any, optimizer: Any) -> Step:
    """The train step of a network of `hk.nets` with 1,000 classes."""

    def forward(images: jax.Array) -> jax.Array:
        return network(1000)(images, is_training=True)

    def loss(logits: jax.Array, _: jax.Array, labels: jax.Array) -> jax.Array:
        return cross_entropy(logits, labels)

    return with_state(forward, loss, (floats(rows, 224, 224, 3), ints(rows)), sizes, weights, optimizer)


def vq_vae(sizes: Sizes) -> Step:
    """The train step of an autoencoder whose code book has moving averages."""

    def forward(images: jax.Array) -> Any:
        h = images
        for channels in (128, 256, 512):
            h = jax.nn.relu(hk.Conv2D(channels, 4, 2)(h))
        coded = hk.nets.VectorQuantizerEMA(256, 8192, 0.25, 0.99)(hk.Conv2D(256, 1)(h), is_training=True)
        h = coded["quantize"]
        for channels in (512, 256, 128):
            h = jax.nn.relu(hk.Conv2DTranspose(channels, 4, 2)(h))
        return hk.Conv2D(3, 1)(h), coded["loss"]

    def loss(output: Any, images: jax.Array) -> jax.Array:
        return jnp.mean((output[0] - images) ** 2) + output[1]

    return with_state(forward, loss, (floats(32, 256, 256, 3),), sizes, replicated, optax.adam(3e-4))


def encode(sizes: Sizes) -> Step:
    """The logits of MobileNet in inference, in bfloat16."""
    model = hk.transform_with_state(lambda x, is_training: hk.nets.MobileNetV1(num_classes=1000)(x, is_training))
    images = floats(1024, 224, 224, 3, dtype=jnp.bfloat16)
    variables = jax.eval_shape(lambda key, x: bfloat16(model.init(key, x, True)), KEY, images)

    def run(images: jax.Array, variables: Any) -> jax.Array:
        return model.apply(*variables, None, images, False)[0]

    return Step(run=run, args=(images, variables), specs=(batch_specs(images, sizes), replicated(variables, sizes)))


MOMENTUM = optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(0.1, momentum=0.9, nesterov=True))

PROGRAMS: dict[str, MakeProgram] = {
    "conv lstm": video,
    "resnet50": partial(classifier, network=hk.nets.ResNet50, rows=128, weights=replicated, optimizer=MOMENTUM),
    "resnet101, fsdp": partial(classifier, network=hk.nets.ResNet101, rows=64, weights=largest_dim, optimizer=MOMENTUM),
    "vq-vae": vq_vae,
    "mobilenet, inference": encode,
}
