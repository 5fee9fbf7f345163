"""A BERT: a bidirectional transformer that fills in masked tokens, as plain flax nnx modules without any sharding.

As published: learned positions, GELU, biases, layer norms after each branch (`order="post"`; the small preset norms
before, which learns faster at its size), an output layer with a norm whose table is that of the embedding. Left out:
segments and the prediction of the next sentence, which later work found to bring nothing.

The output layer sees the masked positions alone: its logits are [B, K, V], not [B, S, V].

Shape suffixes: those of `transformer`, V vocabulary, K masked positions of a sequence.

References: Devlin et al., BERT, arXiv:1810.04805; Liu et al., RoBERTa, arXiv:1907.11692, section 4.2.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from .transformer import (
    MLP,
    Block,
    Branch,
    LayerNorm,
    bidirectional,
    common_mistakes,
    dropout,
    loss,
    normal,
    run,
    stack,
    zeros,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The sizes of a model and how it is computed; mistakes are all reported together."""

    vocab: int
    """Number of different tokens, with the mask."""
    context: int
    """Longest sequence."""
    layers: int
    """Number of blocks."""
    features: int
    """Width of the residual stream."""
    heads: int
    """Number of heads; divides `features`."""
    mlp_features: int
    """Width of the hidden layer of each MLP."""
    order: Literal["post", "pre"] = "post"
    """Where the norms of a block are: after each branch's sum, as published, or before each branch."""
    scan: bool = False
    """Whether layers are stacked and scanned, which compiles one block for any depth, or unrolled."""
    remat: bool = False
    """Whether blocks are computed again in the backward pass, all but their attention output."""
    dropout: float = 0.0
    """Share of the embedding and of each branch's output that is dropped when the call is given a key."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of activations; parameters, norms and softmax stay in float32."""

    def __post_init__(self):
        wrong = common_mistakes(self, ("vocab", "context", "layers", "features", "heads", "mlp_features"))
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


# A vocabulary of 30,592 is BERT's 30,522 rounded up to a multiple of 128, so that axes divide it; 288 are the bytes and
# a mask, rounded up to a multiple of 32.
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
    """tokens_BS -> x_BSM: a row of the table for each token plus one for its position."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.dtype = config.dtype
        self.table = normal(rngs, (config.vocab, config.features), fan_in=config.features)
        self.positions = normal(rngs, (config.context, config.features), fan_in=config.features)

    def __call__(self, tokens_BS: jax.Array) -> jax.Array:
        x_BSM = jnp.take(self.table[...].astype(self.dtype), tokens_BS, axis=0, mode="clip")
        return x_BSM + self.positions[: tokens_BS.shape[1]].astype(self.dtype)[None, :, :]


class Output(nnx.Module):
    """What becomes of a position before it meets the table: a layer, a GELU and a norm."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.w = normal(rngs, (config.features, config.features), fan_in=config.features)
        self.bias = zeros(config.features)
        self.norm = LayerNorm(config.features)

    def __call__(self, x_BKM: jax.Array) -> jax.Array:
        h_BKM = jnp.einsum("BKM,MN->BKN", x_BKM, self.w[...].astype(x_BKM.dtype))
        return self.norm(jax.nn.gelu(h_BKM + self.bias[...].astype(x_BKM.dtype)[None, None, :]))


class BERT(nnx.Module):
    """The whole model: tokens_BS, positions_BK -> logits_BKV.

    Args:
        config: its sizes.
        rngs: its `params` stream gives the initial values.
        attention, mlp: make the two branches of a block. For another attention between the same projections:
            `functools.partial(transformer.Attention, attend=...)`.
    """

    def __init__(
        self,
        config: Config,
        *,
        rngs: nnx.Rngs,
        attention: Branch = bidirectional,
        mlp: Branch = MLP,
    ):
        def block(key: jax.Array) -> Block:
            own = nnx.Rngs(params=key)
            return Block(config, rngs=own, attention=attention, mlp=mlp, norm=LayerNorm, order=config.order)

        self.config = config
        self.blocks = stack(block, config, rngs.params())
        self.embed = Embed(config, rngs=rngs)
        # Where the norms are in the blocks decides which end of the stream lacks one.
        self.embed_norm = LayerNorm(config.features) if config.order == "post" else None
        self.final_norm = LayerNorm(config.features) if config.order == "pre" else None
        self.output = Output(config, rngs=rngs)
        self.logit_bias = zeros(config.vocab)

    def encode(self, tokens_BS: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """What the model makes of each position, x_BSM; a `key` turns dropout on."""
        if tokens_BS.shape[1] > self.config.context:
            raise ValueError(f"BERT: {tokens_BS.shape[1]} tokens in a sequence, the context is {self.config.context}")
        keys = (None, None) if key is None else jax.random.split(key)
        x_BSM = self.embed(tokens_BS)
        if self.embed_norm is not None:
            x_BSM = self.embed_norm(x_BSM)
        x_BSM = run(self.blocks, dropout(x_BSM, self.config.dropout, keys[0]), keys[1], self.config)
        return x_BSM if self.final_norm is None else self.final_norm(x_BSM)

    def __call__(self, tokens_BS: jax.Array, positions_BK: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Logits [B, K, V] of the tokens at `positions_BK`; a `key` turns dropout on."""
        x_BSM = self.encode(tokens_BS, key)
        x_BKM = self.output(jnp.take_along_axis(x_BSM, positions_BK[:, :, None], axis=1, mode="clip"))
        logits_BKV = jnp.einsum("BKM,VM->BKV", x_BKM, self.embed.table[...].astype(x_BKM.dtype))
        return logits_BKV + self.logit_bias[...].astype(x_BKM.dtype)[None, None, :]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Masked:
    """Sequences with some tokens hidden, and what was there: arrays on the host or the devices, or their shapes."""

    tokens: Any
    """What the model sees, [B, S]."""
    positions: Any
    """Where it is asked, [B, K]."""
    targets: Any
    """What was there, [B, K]."""


def masked_loss(model: BERT, batch: Masked, key: jax.Array | None = None) -> jax.Array:
    """Mean nats of a hidden token."""
    return loss(model(batch.tokens, batch.positions, key), batch.targets)
