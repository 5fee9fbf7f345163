"""A BERT: a bidirectional transformer trained on masked tokens, as plain flax nnx modules without any sharding.

As published: learned positions, GELU, biases, post-norm blocks (`order="post"`; the small preset is pre-norm, which
learns faster at its size), an output layer with a norm and the tied embedding table. Omitted: segment embeddings and
next-sentence prediction, which later work found useless.

The output layer runs on the masked positions only: logits are [B, K, V], not [B, S, V].

Shape suffixes as in `transformer_layers`, and V vocabulary, K masked positions of a sequence.

References: Devlin et al., BERT, arXiv:1810.04805; Liu et al., RoBERTa, arXiv:1907.11692, section 4.2.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from .remat_policy import Remat
from .transformer import config_errors, loss, run, stack
from .transformer_block import Block
from .transformer_layers import MLP, Branch, LayerNorm, bidirectional_attention, dropout, normal, zeros


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Model sizes and compute options; all errors are reported together."""

    vocab: int
    """Vocabulary size, including the mask token."""
    context: int
    """Maximum sequence length."""
    layers: int
    """Number of blocks."""
    features: int
    """Width of the residual stream."""
    heads: int
    """Number of heads; divides `features`."""
    mlp_features: int
    """Width of the hidden layer of each MLP."""
    order: Literal["post", "pre"] = "post"
    """Post-norm (after each residual sum, as published) or pre-norm blocks."""
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
        wrong = config_errors(self, ("vocab", "context", "layers", "features", "heads", "mlp_features"))
        if self.order not in ("post", "pre"):
            wrong.append(f"order={self.order!r} must be 'post' or 'pre'")
        if wrong:
            raise ValueError("bert.Config: " + "; ".join(wrong))

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


# A vocabulary of 30,592 is BERT's 30,522 rounded up to a multiple of 128, so that axis sizes divide it; 288 is
# 256 byte values and a mask token, rounded up to a multiple of 32.
PRESETS = {
    "bert-tiny": Config(
        vocab=288, context=128, layers=4, features=128, heads=8, mlp_features=512, order="pre",
    ),
    "bert-base": Config(
        vocab=30_592, context=512, layers=12, features=768, heads=12, mlp_features=3072, dropout=0.1, dtype="bfloat16",
    ),
    "bert-large": Config(
        vocab=30_592, context=512, layers=24, features=1024, heads=16, mlp_features=4096, dropout=0.1, scan=True,
        remat=True, dtype="bfloat16",
    ),
}  # fmt: skip


class Embed(nnx.Module):
    """tokens_BS -> x_BSM: token embedding plus learned position embedding."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.dtype = config.dtype
        self.table = normal(rngs, (config.vocab, config.features), fan_in=config.features)
        self.positions = normal(rngs, (config.context, config.features), fan_in=config.features)

    def __call__(self, tokens_BS: jax.Array) -> jax.Array:
        x_BSM = jnp.take(self.table[...].astype(self.dtype), tokens_BS, axis=0, mode="clip")
        return x_BSM + self.positions[: tokens_BS.shape[1]].astype(self.dtype)[None, :, :]


class Output(nnx.Module):
    """Masked-LM head before the output table: a dense layer, a GELU and a norm."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.w = normal(rngs, (config.features, config.features), fan_in=config.features)
        self.bias = zeros(config.features)
        self.norm = LayerNorm(config.features, config.kernels)

    def __call__(self, x_BKM: jax.Array) -> jax.Array:
        h_BKM = jnp.einsum("BKM,MN->BKN", x_BKM, self.w[...].astype(x_BKM.dtype))
        return self.norm(jax.nn.gelu(h_BKM + self.bias[...].astype(x_BKM.dtype)[None, None, :]))


class BERT(nnx.Module):
    """A BERT: tokens_BS, positions_BK -> logits_BKV.

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
            own = nnx.Rngs(params=key)
            return Block(config, rngs=own, attention=attention, mlp=mlp, norm=LayerNorm, order=config.order)

        self.config = config
        self.blocks = stack(block, config, rngs.params())
        self.embed = Embed(config, rngs=rngs)
        # Post-norm blocks leave the embedding without a norm, pre-norm blocks the output.
        self.embed_norm = LayerNorm(config.features, config.kernels) if config.order == "post" else None
        self.final_norm = LayerNorm(config.features, config.kernels) if config.order == "pre" else None
        self.output = Output(config, rngs=rngs)
        self.logit_bias = zeros(config.vocab)

    def encode(self, tokens_BS: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """The encoder output x_BSM; a `key` enables dropout."""
        if tokens_BS.shape[1] > self.config.context:
            raise ValueError(
                f"BERT: {tokens_BS.shape[1]} tokens in a sequence exceed the context of {self.config.context}"
            )
        keys = (None, None) if key is None else jax.random.split(key)
        x_BSM = self.embed(tokens_BS)
        if self.embed_norm is not None:
            x_BSM = self.embed_norm(x_BSM)
        x_BSM = run(self.blocks, dropout(x_BSM, self.config.dropout, keys[0]), keys[1], self.config)
        return x_BSM if self.final_norm is None else self.final_norm(x_BSM)

    def __call__(self, tokens_BS: jax.Array, positions_BK: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Logits [B, K, V] of the tokens at `positions_BK`; a `key` enables dropout."""
        x_BSM = self.encode(tokens_BS, key)
        x_BKM = self.output(jnp.take_along_axis(x_BSM, positions_BK[:, :, None], axis=1, mode="clip"))
        logits_BKV = jnp.einsum("BKM,VM->BKV", x_BKM, self.embed.table[...].astype(x_BKM.dtype))
        return logits_BKV + self.logit_bias[...].astype(x_BKM.dtype)[None, None, :]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Masked:
    """A batch for masked-LM training: host or device arrays, or their ShapeDtypeStructs."""

    tokens: Any
    """Input tokens, some of them masked, [B, S]."""
    positions: Any
    """Positions to predict, [B, K]."""
    targets: Any
    """Original tokens at these positions, [B, K]."""


def masked_loss(model: BERT, batch: Masked, key: jax.Array | None = None) -> jax.Array:
    """Mean cross entropy in nats per masked token."""
    return loss(model(batch.tokens, batch.positions, key), batch.targets)
