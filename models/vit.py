"""A vision transformer: an image as a sequence of patches, as plain flax nnx modules without any sharding.

As published: linear patch embedding, learned positions, pre-norm blocks with layer norms, GELU and biases. The
classifier reads a class token or, with `pool="mean"`, the mean over patches, which keeps the sequence a power of two.

Shape suffixes as in `transformer_layers`, and I image rows, J image columns, C channels, S patches and the class token,
X pixels of a patch times channels, V classes.

References: Dosovitskiy et al., An Image is Worth 16x16 Words, arXiv:2010.11929, section 3.1 and appendix D.4.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from .image_classifier import Head, check_shape
from .remat_policy import Remat
from .transformer import config_errors, run, stack
from .transformer_block import Block
from .transformer_layers import MLP, Branch, LayerNorm, bidirectional_attention, dropout, normal, zeros


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Model sizes and compute options; all errors are reported together."""

    image: int
    """Image height and width in pixels."""
    channels: int
    """Channels of the input image."""
    patch: int
    """Patch height and width in pixels; divides `image`."""
    classes: int
    """Number of classes."""
    layers: int
    """Number of blocks."""
    features: int
    """Width of the residual stream."""
    heads: int
    """Number of heads; divides `features`."""
    mlp_features: int
    """Width of the hidden layer of each MLP."""
    pool: Literal["token", "mean"] = "token"
    """Input of the classifier: a class token before the patches, or the mean over patches."""
    scan: bool = False
    """Whether layers are stacked and scanned (one block compiled for any depth) or unrolled."""
    remat: Remat = False
    """Whether blocks are rematerialised in the backward pass, except their attention output; or the policies of
    `jax.checkpoint` of consecutive blocks, in turn."""
    dropout: float = 0.0
    """Dropout rate of the embedding and of each branch's output, when called with a key."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of activations; parameters, norms and softmax stay in float32."""
    kernels: Literal["auto", "xla", "pallas"] = "auto"
    """Attention and norms: Pallas kernels, plain JAX, or what is fast on the mesh's platform: kernels, on CPUs none but
    attention in blocks."""

    def __post_init__(self):
        sizes = ("image", "channels", "patch", "classes", "layers", "features", "heads", "mlp_features")
        wrong = config_errors(self, sizes)
        if self.patch >= 1 and self.image % self.patch:
            wrong.append(f"image={self.image} must be a multiple of patch={self.patch}")
        if self.pool not in ("token", "mean"):
            wrong.append(f"pool={self.pool!r} must be 'token' or 'mean'")
        if wrong:
            raise ValueError("vit.Config: " + "; ".join(wrong))

    @property
    def num_patches(self) -> int:
        return (self.image // self.patch) ** 2

    @property
    def kv_heads(self) -> int:
        return self.heads

    @property
    def head_features(self) -> int:
        return self.features // self.heads

    @property
    def positions(self) -> str:
        return "learned"

    @property
    def biases(self) -> bool:
        return True


PRESETS = {
    "vit-tiny": Config(
        image=8, channels=1, patch=2, classes=10, layers=4, features=64, heads=8, mlp_features=128, pool="mean",
    ),
    "vit-b16": Config(
        image=224, channels=3, patch=16, classes=1000, layers=12, features=768, heads=12, mlp_features=3072,
        dtype="bfloat16",
    ),
    "vit-h14": Config(
        image=224, channels=3, patch=14, classes=1000, layers=32, features=1280, heads=16, mlp_features=5120,
        scan=True, remat=True, dtype="bfloat16",
    ),
}  # fmt: skip


def patches(images_BIJC: jax.Array, size: int) -> jax.Array:
    """Flattened patches of `size` by `size` pixels in row-major order, [B, S, X]."""
    batch, rows, columns, channels = images_BIJC.shape
    tiles = images_BIJC.reshape(batch, rows // size, size, columns // size, size, channels)
    return tiles.transpose(0, 1, 3, 2, 4, 5).reshape(batch, -1, size * size * channels)


class Embed(nnx.Module):
    """images_BIJC -> x_BSM: projected patches, after the class token if any, plus position embeddings."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        pixels, token = config.patch**2 * config.channels, config.pool == "token"
        self.patch, self.dtype = config.patch, config.dtype
        self.w = normal(rngs, (pixels, config.features), fan_in=pixels)
        self.bias = zeros(config.features)
        self.positions = normal(rngs, (config.num_patches + token, config.features), fan_in=config.features)
        self.class_token = zeros(config.features) if token else None

    def __call__(self, images_BIJC: jax.Array) -> jax.Array:
        x_BSX = patches(images_BIJC.astype(self.dtype), self.patch)
        x_BSM = jnp.einsum("BSX,XM->BSM", x_BSX, self.w[...].astype(self.dtype))
        x_BSM += self.bias[...].astype(self.dtype)[None, None, :]
        if self.class_token is not None:
            first = jnp.broadcast_to(self.class_token[...].astype(self.dtype), (x_BSM.shape[0], 1, x_BSM.shape[2]))
            x_BSM = jnp.concatenate([first, x_BSM], axis=1)
        return x_BSM + self.positions[...].astype(self.dtype)[None, :, :]


class ViT(nnx.Module):
    """A vision transformer: images_BIJC -> logits_BV.

    Args:
        config: model configuration.
        rngs: initialises parameters from its `params` stream.
        attention, mlp: branch factories. To change only the attention function between the projections:
            `functools.partial(transformer_layers.Attention, attend=...)`.
    """

    def __init__(
        self,
        config: Config,
        *,
        rngs: nnx.Rngs,
        attention: Branch = bidirectional_attention,
        mlp: Branch = MLP,
    ):
        def block(key: jax.Array) -> Block:
            return Block(config, rngs=nnx.Rngs(params=key), attention=attention, mlp=mlp, norm=LayerNorm)

        self.config = config
        self.blocks = stack(block, config, rngs.params())
        self.embed = Embed(config, rngs=rngs)
        self.final_norm = LayerNorm(config.features, config.kernels)
        self.head = Head(config.features, config.classes, rngs=rngs)

    def __call__(self, images_BIJC: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Logits [B, V] of the classes, float32; a `key` enables dropout."""
        config = self.config
        check_shape("ViT", images_BIJC, (config.image, config.image, config.channels))
        keys = (None, None) if key is None else jax.random.split(key)
        x_BSM = run(self.blocks, dropout(self.embed(images_BIJC), config.dropout, keys[0]), keys[1], config)
        x_BSM = self.final_norm(x_BSM)
        return self.head(x_BSM[:, 0] if config.pool == "token" else jnp.mean(x_BSM, axis=1))
