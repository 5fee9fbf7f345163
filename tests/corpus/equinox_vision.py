"""Equinox: image models from `eqx.nn`, with batch norm's state, random keys and up- and downsampling convolutions.

Shape suffixes: C channels, Y X pixels, N patches, M features.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from support.train_steps.step import Sizes, Step

from sharding import P

from . import MakeProgram
from .common import KEY, Rules, batch_specs, bfloat16, floats, ints, largest_dim, replicated, specs_by
from .equinox_models import equinox_step, is_shape

PACKAGE = "equinox"


class Bottleneck(eqx.Module):
    """A residual block with three convolutions and batch norms."""

    convs: list[eqx.nn.Conv2d]
    norms: list[eqx.nn.BatchNorm]
    shortcut: eqx.nn.Conv2d | None

    def __init__(self, channels: int, width: int, stride: int, key: jax.Array) -> None:
        keys = iter(jax.random.split(key, 4))
        sizes = [(channels, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1)]
        self.convs = [eqx.nn.Conv2d(i, o, k, s, k // 2, use_bias=False, key=next(keys)) for i, o, k, s in sizes]
        self.norms = [eqx.nn.BatchNorm(o, "batch", mode="batch") for _, o, *_ in sizes]
        same = channels == 4 * width and stride == 1
        self.shortcut = None if same else eqx.nn.Conv2d(channels, 4 * width, 1, stride, key=next(keys))

    def __call__(self, x_CYX: jax.Array, state: eqx.nn.State) -> tuple[jax.Array, eqx.nn.State]:
        h = x_CYX
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            h, state = norm(conv(h), state)
            h = jax.nn.relu(h) if i < 2 else h
        return jax.nn.relu(h + (x_CYX if self.shortcut is None else self.shortcut(x_CYX))), state


class ResNet(eqx.Module):
    """ResNet-50 times `wide`."""

    stem: eqx.nn.Conv2d
    pool: eqx.nn.MaxPool2d
    blocks: list[Bottleneck]
    head: eqx.nn.Linear

    def __init__(self, wide: int, key: jax.Array) -> None:
        keys = iter(jax.random.split(key, 20))
        self.stem = eqx.nn.Conv2d(3, 64, 7, 2, 3, key=next(keys))
        self.pool = eqx.nn.MaxPool2d(3, 2, 1)
        self.blocks, channels = [], 64
        for stage, depth in enumerate((3, 4, 6, 3)):
            width = 64 * wide * 2**stage
            for i in range(depth):
                self.blocks.append(Bottleneck(channels, width, 2 if stage and i == 0 else 1, next(keys)))
                channels = 4 * width
        self.head = eqx.nn.Linear(channels, 1000, key=next(keys))

    def __call__(self, x_CYX: jax.Array, state: eqx.nn.State) -> tuple[jax.Array, eqx.nn.State]:
        x_CYX = self.pool(self.stem(x_CYX))
        for block in self.blocks:
            x_CYX, state = block(x_CYX, state)
        return self.head(x_CYX.mean((1, 2))), state


def stateful_step(make: Any, loss: Any, batch: Any, sizes: Sizes, weights: Any, optimizer: Any) -> Step:
    """As `equinox_step`, for layers with state.

    Args:
        make: key -> (model, state of its layers).
        loss: (model, state, *batch) -> (mean loss, new state).
        batch: shapes.
        sizes: the mesh.
        weights: (abstract arrays of the model, sizes) -> their specs.
        optimizer: of the model's arrays.
    """
    (params, layers), static = eqx.partition(eqx.filter_eval_shape(make, KEY), is_shape)

    def run(state: Any, *batch: Any) -> Any:
        params, layers, optimizer_state = state
        model, layers = eqx.combine((params, layers), static)
        (value, layers), gradient = eqx.filter_value_and_grad(loss, has_aux=True)(model, layers, *batch)
        updates, optimizer_state = optimizer.update(gradient, optimizer_state, params)
        params, layers = eqx.filter((eqx.apply_updates(model, updates), layers), eqx.is_array)
        return (params, layers, optimizer_state), value

    state = params, layers, jax.eval_shape(optimizer.init, params)
    return Step(run=run, args=(state, *batch), specs=((weights(params, sizes), None, None), *batch_specs(batch, sizes)))


def resnet(sizes: Sizes, *, wide: int, rows: int, weights: Any) -> Step:
    """SGD with momentum; batch norm's statistics are over the global batch."""

    def make(key: jax.Array) -> Any:
        return eqx.nn.make_with_state(ResNet)(wide, key)

    def loss(model: ResNet, state: eqx.nn.State, x: jax.Array, label: jax.Array) -> Any:
        batched = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        logits, state = batched(x, state)
        return optax.softmax_cross_entropy_with_integer_labels(logits, label).mean(), state

    optimizer = optax.sgd(0.1, momentum=0.9, nesterov=True)
    return stateful_step(make, loss, (floats(rows, 3, 224, 224), ints(rows)), sizes, weights, optimizer)


class MixerBlock(eqx.Module):
    """MLPs over patches and over features, each after a layer norm."""

    mlps: tuple[eqx.nn.MLP, eqx.nn.MLP]
    norms: tuple[eqx.nn.LayerNorm, eqx.nn.LayerNorm]

    def __init__(self, patches: int, features: int, hidden: tuple[int, int], key: jax.Array) -> None:
        keys = jax.random.split(key)
        sizes = zip((patches, features), hidden, keys, strict=True)
        self.mlps = tuple(eqx.nn.MLP(n, n, f, 1, jax.nn.gelu, key=k) for n, f, k in sizes)
        self.norms = eqx.nn.LayerNorm((features, patches)), eqx.nn.LayerNorm((patches, features))

    def __call__(self, y_MN: jax.Array) -> jax.Array:
        y_MN = y_MN + jax.vmap(self.mlps[0])(self.norms[0](y_MN))
        y_NM = y_MN.T
        return (y_NM + jax.vmap(self.mlps[1])(self.norms[1](y_NM))).T


class Mixer(eqx.Module):
    """The MLP-Mixer that denoises images, conditioned on the time by an extra channel."""

    down: eqx.nn.Conv2d
    blocks: list[MixerBlock]
    up: eqx.nn.ConvTranspose2d

    def __init__(self, image: int, patch: int, features: int, depth: int, key: jax.Array) -> None:
        first, last, *keys = jax.random.split(key, depth + 2)
        patches = (image // patch) ** 2
        self.down = eqx.nn.Conv2d(4, features, patch, patch, key=first)
        self.blocks = [MixerBlock(patches, features, (2048, 4 * features), k) for k in keys]
        self.up = eqx.nn.ConvTranspose2d(features, 3, patch, patch, key=last)

    def __call__(self, t: jax.Array, x_CYX: jax.Array) -> jax.Array:
        h = self.down(jnp.concatenate([x_CYX, jnp.broadcast_to(t, (1, *x_CYX.shape[1:]))]))
        y_MN = h.reshape(len(h), -1)
        for block in self.blocks:
            y_MN = block(y_MN)
        return self.up(y_MN.reshape(h.shape))


class UNet(eqx.Module):
    """Levels of two convolutions with group norm; max pools on the way down, transposed convolutions on the way up."""

    down: list[list[eqx.Module]]
    up: list[eqx.nn.ConvTranspose2d]
    merge: list[list[eqx.Module]]
    out: eqx.nn.Conv2d
    pool: eqx.nn.MaxPool2d

    def __init__(self, width: int, levels: int, key: jax.Array) -> None:
        keys = iter(jax.random.split(key, 8 * levels))

        def pair(i: int, o: int) -> list[eqx.Module]:
            convs = [eqx.nn.Conv2d(n, o, 3, padding=1, key=next(keys)) for n in (i, o)]
            return [module for conv in convs for module in (conv, eqx.nn.GroupNorm(32, o))]

        widths = [width * 2**n for n in range(levels)]
        self.down = [pair(i, o) for i, o in zip((4, *widths), widths, strict=False)]
        self.up = [eqx.nn.ConvTranspose2d(2 * w, w, 2, 2, key=next(keys)) for w in widths[:-1]]
        self.merge = [pair(2 * w, w) for w in widths[:-1]]
        self.out = eqx.nn.Conv2d(width, 3, 1, key=next(keys))
        self.pool = eqx.nn.MaxPool2d(2, 2)

    def __call__(self, t: jax.Array, x_CYX: jax.Array) -> jax.Array:
        def convolve(pair: list[Any], h: jax.Array) -> jax.Array:
            return jax.nn.silu(pair[3](pair[2](jax.nn.silu(pair[1](pair[0](h))))))

        h, skipped = jnp.concatenate([x_CYX, jnp.broadcast_to(t, (1, *x_CYX.shape[1:]))]), []
        for level, pair in enumerate(self.down):
            h = convolve(pair, self.pool(h) if level else h)
            skipped.append(h)
        for pair, up, skip in [*zip(self.merge, self.up, skipped, strict=False)][::-1]:
            h = convolve(pair, jnp.concatenate([up(h), skip]))
        return self.out(h)


def diffusion_loss(model: Any, images: jax.Array, key: jax.Array, *, half: bool = False) -> jax.Array:
    """Denoising score matching at a random time for each image."""
    model = bfloat16(model) if half else model
    k1, k2 = jax.random.split(key)
    times = jax.random.uniform(k1, images.shape[:1])
    noise = jax.random.normal(k2, images.shape)
    scale = jnp.sqrt(1 - jnp.exp(-times))[:, None, None, None]
    noisy = images * jnp.exp(-0.5 * times)[:, None, None, None] + noise * scale
    score = jax.vmap(model)(*(bfloat16((times, noisy)) if half else (times, noisy)))
    return jnp.mean((score * scale + noise) ** 2)


def diffusion(sizes: Sizes, *, make: Any, rows: int, image: int, weights: Any, half: bool = False) -> Step:
    """The train step of a denoising model."""
    return equinox_step(make, partial(diffusion_loss, half=half), (floats(rows, 3, image, image), KEY), sizes, weights)


MIXER: Rules = (
    ("blocks/*/mlps/*/layers/0/weight", P("model", None)),
    ("blocks/*/mlps/*/layers/0/bias", P("model")),
    ("blocks/*/mlps/*/layers/1/weight", P(None, "model")),
)
CHANNELS: Rules = (("*/0/weight", P("model", None, None, None)), ("*/2/weight", P(None, "model", None, None)))

PROGRAMS: dict[str, MakeProgram] = {
    "resnet50": partial(resnet, wide=1, rows=64, weights=replicated),
    "resnet50 x4, fsdp": partial(resnet, wide=4, rows=16, weights=largest_dim),
    "mixer": partial(
        diffusion, make=partial(Mixer, 256, 16, 1024, 24), rows=32, image=256, weights=partial(specs_by, MIXER)
    ),
    "unet": partial(
        diffusion, make=partial(UNet, 128, 5), rows=16, image=256, weights=partial(specs_by, CHANNELS), half=True
    ),
}
