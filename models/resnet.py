"""A ResNet: residual blocks of convolutions and batch norms, as plain flax nnx modules without any sharding.

As published, with two customary changes: a bottleneck's stride is in its 3x3 convolution ("v1.5"), and the last norm of
each block is initialised to zero, so that a block starts as its shortcut.

Batch norm takes its statistics over the global batch: under `jit` the batch is one array however it is sharded, so any
mesh computes the statistics of one device. Its running averages are `nnx.BatchStat` variables, updated in place by a
call in training.

Shape suffixes: B batch, I rows, J columns, C channels, V classes. Kernels are [rows, columns, channels in, out].

References: He et al., Deep Residual Learning, arXiv:1512.03385; Goyal et al., arXiv:1706.02677, section 5.1.
"""

import dataclasses
from collections.abc import Iterator
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from .image_classifier import Head, check_shape


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Model sizes and compute options; all errors are reported together."""

    image: int
    """Image height and width in pixels."""
    channels: int
    """Channels of the input image."""
    classes: int
    """Number of classes."""
    stages: tuple[int, ...]
    """Blocks per stage; each stage after the first halves rows and columns and doubles channels."""
    width: int
    """Channels inside the blocks of the first stage."""
    block: Literal["basic", "bottleneck"] = "basic"
    """Two 3x3 convolutions, or 1x1, 3x3 and 1x1, the last with four times the channels."""
    stem: Literal["small", "large"] = "large"
    """A 3x3 convolution, or a 7x7 convolution and a 3x3 max pool, both of stride 2."""
    momentum: float = 0.9
    """Decay of the running averages per step."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of activations; parameters and statistics stay in float32."""

    def __post_init__(self):
        names = ("image", "channels", "classes", "width")
        wrong = [f"{name}={getattr(self, name)} must be at least 1" for name in names if getattr(self, name) < 1]
        if not self.stages or min(self.stages) < 1:
            wrong.append(f"stages={self.stages} must be numbers of at least 1")
        if self.block not in ("basic", "bottleneck"):
            wrong.append(f"block={self.block!r} must be 'basic' or 'bottleneck'")
        if self.stem not in ("small", "large"):
            wrong.append(f"stem={self.stem!r} must be 'small' or 'large'")
        if not 0 <= self.momentum < 1:
            wrong.append(f"momentum={self.momentum} must be at least 0 and less than 1")
        if self.dtype not in ("float32", "bfloat16"):
            wrong.append(f"dtype={self.dtype!r} must be 'float32' or 'bfloat16'")
        if wrong:
            raise ValueError("resnet.Config: " + "; ".join(wrong))


PRESETS = {
    "resnet-tiny": Config(image=8, channels=1, classes=10, stages=(1, 1), width=16, stem="small"),
    "resnet-18": Config(image=224, channels=3, classes=1000, stages=(2, 2, 2, 2), width=64, dtype="bfloat16"),
    "resnet-50": Config(
        image=224, channels=3, classes=1000, stages=(3, 4, 6, 3), width=64, block="bottleneck", dtype="bfloat16",
    ),
}  # fmt: skip


def _conv(config: Config, before: int, after: int, size: int, stride: int, rngs: nnx.Rngs) -> nnx.Conv:
    # Symmetric padding, as published: "SAME" pads only the end for a stride of 2.
    return nnx.Conv(
        before,
        after,
        kernel_size=(size, size),
        strides=(stride, stride),
        padding=[(size // 2, size // 2)] * 2,
        use_bias=False,
        kernel_init=nnx.initializers.variance_scaling(2.0, "fan_out", "normal"),
        dtype=jnp.dtype(config.dtype),
        rngs=rngs,
    )


def _norm(config: Config, channels: int, rngs: nnx.Rngs, *, start: float = 1.0) -> nnx.BatchNorm:
    return nnx.BatchNorm(
        channels,
        momentum=config.momentum,
        dtype=jnp.dtype(config.dtype),
        scale_init=nnx.initializers.constant(start),
        rngs=rngs,
    )


class Block(nnx.Module):
    """A residual block: convolutions with norms and a shortcut, x_BIJC -> x_BIJC.

    `conv1` and `conv2` are the last two convolutions, with most of the weights; a bottleneck's first is `narrow`.

    Args:
        config: model configuration.
        before: input channels.
        width: channels inside the block.
        stride: 2 halves rows and columns.
        rngs: initialises parameters from its `params` stream.
    """

    def __init__(self, config: Config, before: int, width: int, stride: int, *, rngs: nnx.Rngs):
        bottleneck = config.block == "bottleneck"
        after = channels_after(config, width)
        self.narrow = _conv(config, before, width, 1, 1, rngs) if bottleneck else None
        self.narrow_norm = _norm(config, width, rngs) if bottleneck else None
        self.conv1 = _conv(config, width if bottleneck else before, width, 3, stride, rngs)
        self.norm1 = _norm(config, width, rngs)
        self.conv2 = _conv(config, width, after, 1 if bottleneck else 3, 1, rngs)
        self.norm2 = _norm(config, after, rngs, start=0.0)
        changes = stride != 1 or before != after
        self.shortcut = _conv(config, before, after, 1, stride, rngs) if changes else None
        self.shortcut_norm = _norm(config, after, rngs) if changes else None

    def __call__(self, x_BIJC: jax.Array, *, training: bool) -> jax.Array:
        running = not training
        h = x_BIJC
        if self.narrow is not None and self.narrow_norm is not None:
            h = jax.nn.relu(self.narrow_norm(self.narrow(h), use_running_average=running))
        h = jax.nn.relu(self.norm1(self.conv1(h), use_running_average=running))
        h = self.norm2(self.conv2(h), use_running_average=running)
        if self.shortcut is not None and self.shortcut_norm is not None:
            x_BIJC = self.shortcut_norm(self.shortcut(x_BIJC), use_running_average=running)
        return jax.nn.relu(x_BIJC + h)


def channels_after(config: Config, width: int) -> int:
    """Output channels of a block with `width` channels inside."""
    return width * (4 if config.block == "bottleneck" else 1)


def _blocks(config: Config, rngs: nnx.Rngs) -> Iterator[Block]:
    before = config.width
    for stage, count in enumerate(config.stages):
        width = config.width * 2**stage
        for i in range(count):
            yield Block(config, before, width, 2 if stage and not i else 1, rngs=rngs)
            before = channels_after(config, width)


def _maximum(x_BIJC: jax.Array) -> jax.Array:
    """3x3 max pool of stride 2."""
    around = ((0, 0), (1, 1), (1, 1), (0, 0))
    return jax.lax.reduce_window(x_BIJC, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), around)


class ResNet(nnx.Module):
    """A ResNet: images_BIJC -> logits_BV.

    Args:
        config: model configuration.
        rngs: initialises parameters from its `params` stream.
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        large = config.stem == "large"
        self.config = config
        self.stem = _conv(config, config.channels, config.width, 7 if large else 3, 2 if large else 1, rngs)
        self.stem_norm = _norm(config, config.width, rngs)
        self.blocks = nnx.List(_blocks(config, rngs))
        features = channels_after(config, config.width * 2 ** (len(config.stages) - 1))
        self.head = Head(features, config.classes, rngs=rngs)

    def __call__(self, images_BIJC: jax.Array, *, training: bool = False) -> jax.Array:
        """Logits [B, V] of the classes, float32; in training norms use batch statistics and update their averages."""
        config = self.config
        check_shape("ResNet", images_BIJC, (config.image, config.image, config.channels))
        x = self.stem(images_BIJC.astype(config.dtype))
        x = jax.nn.relu(self.stem_norm(x, use_running_average=not training))
        if config.stem == "large":
            x = _maximum(x)
        for block in self.blocks:
            x = block(x, training=training)
        return self.head(jnp.mean(x, axis=(1, 2)))
