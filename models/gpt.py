"""A GPT: a causal transformer over tokens, as plain flax nnx modules without any sharding.

Pre-norm blocks of `transformer` with RMS norms, rotary or learned positions and, by default, no biases.

Shape suffixes as in `transformer_layers`, and V vocabulary.
"""

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from sharding import kernels

from .remat_policy import Remat
from .text_generation import LanguageModel, generate
from .transformer import config_errors, loss, run, stack
from .transformer_block import NO_HOOKS, Block, StreamHooks
from .transformer_layers import (
    MLP,
    Attention,
    AttentionFn,
    Branch,
    KVCache,
    RMSNorm,
    TokenPositions,
    causal_attention,
    dropout,
    normal,
)

__all__ = [
    "GPT",
    "MLP",
    "PRESETS",
    "Attention",
    "AttentionFn",
    "Block",
    "Branch",
    "Config",
    "Embed",
    "Head",
    "KVCache",
    "LanguageModel",
    "RMSNorm",
    "StreamHooks",
    "causal_attention",
    "dropout",
    "generate",
    "loss",
    "next_token_loss",
    "num_params",
]


SIZES = ("vocab", "context", "layers", "features", "heads", "kv_heads", "mlp_features")
"""The fields of `Config` that must be at least 1."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Model sizes and compute options; all errors are reported together."""

    vocab: int
    """Vocabulary size."""
    context: int
    """Maximum sequence length."""
    layers: int
    """Number of blocks."""
    features: int
    """Width of the residual stream."""
    heads: int
    """Number of query heads; divides `features`."""
    kv_heads: int
    """Number of key and value heads, each shared by `heads / kv_heads` query heads."""
    mlp_features: int
    """Width of the hidden layer of each MLP."""
    positions: Literal["rotary", "learned"] = "rotary"
    """Position encoding: rotary on queries and keys, or a learned table added to the embedding."""
    tied: bool = True
    """Whether the head shares the embedding table."""
    biases: bool = False
    """Whether projections have biases."""
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
        wrong = config_errors(self, SIZES)
        if wrong:
            raise ValueError("gpt.Config: " + "; ".join(wrong))

    @property
    def head_features(self) -> int:
        return self.features // self.heads


# A vocabulary of 50,304 is GPT-2's 50,257 rounded up to a multiple of 128, so that axis sizes divide it.
PRESETS = {
    "gpt-tiny": Config(vocab=256, context=128, layers=4, features=128, heads=8, kv_heads=8, mlp_features=512),
    "gpt-small": Config(
        vocab=50_304, context=1024, layers=12, features=768, heads=12, kv_heads=12, mlp_features=3072,
        positions="learned", dtype="bfloat16",
    ),
    "gpt-xl": Config(
        vocab=50_304, context=1024, layers=48, features=1600, heads=25, kv_heads=25, mlp_features=6400,
        positions="learned", scan=True, remat=True, dtype="bfloat16",
    ),
    "gpt-7b": Config(
        vocab=50_304, context=4096, layers=32, features=4096, heads=32, kv_heads=8, mlp_features=16_384,
        tied=False, scan=True, remat=True, dtype="bfloat16",
    ),
    "gpt3-175b": Config(
        vocab=50_304, context=2048, layers=96, features=12_288, heads=96, kv_heads=96, mlp_features=49_152,
        positions="learned", scan=True, remat=True, dtype="bfloat16",
    ),
}  # fmt: skip


class Embed(nnx.Module):
    """tokens_BS, start -> x_BSM: token embedding, plus a position embedding if positions are learned.

    `start` is the position of the first token, or the positions of all tokens [S].
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        learned = config.positions == "learned"
        self.dtype = config.dtype
        self.table = normal(rngs, (config.vocab, config.features), fan_in=config.features)
        self.positions = normal(rngs, (config.context, config.features), fan_in=config.features) if learned else None

    def __call__(self, tokens_BS: jax.Array, start: jax.Array | int = 0) -> jax.Array:
        x_BSM = jnp.take(self.table[...].astype(self.dtype), tokens_BS, axis=0, mode="clip")
        if self.positions is None:
            return x_BSM
        length = tokens_BS.shape[1]
        if isinstance(start, int):
            position_SM = self.positions[start : start + length]
        elif start.ndim:
            position_SM = jnp.take(self.positions[...], start, axis=0, mode="clip")
        else:
            position_SM = jax.lax.dynamic_slice_in_dim(self.positions[...], start, length)
        return x_BSM + position_SM.astype(self.dtype)[None, :, :]


class Head(nnx.Module):
    """The output table, of the embedding table's shape; absent when the two are tied."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.table = normal(rngs, (config.vocab, config.features), fan_in=config.features)


class GPT(nnx.Module):
    """A GPT: tokens_BS -> logits_BSV.

    Args:
        config: model configuration.
        rngs: initialises parameters from its `params` stream.
        attention, mlp: branch factories. To change only the attention function between the projections:
            `functools.partial(Attention, attend=...)`.
        stream: hooks between the residual stream and the branches.
        token_positions: positions of sequences in a permuted order; pass the same to the attention.
    """

    def __init__(
        self,
        config: Config,
        *,
        rngs: nnx.Rngs,
        attention: Branch = Attention,
        mlp: Branch = MLP,
        stream: StreamHooks = NO_HOOKS,
        token_positions: TokenPositions | None = None,
    ):
        def block(key: jax.Array) -> Block:
            return Block(config, rngs=nnx.Rngs(params=key), attention=attention, mlp=mlp, stream=stream)

        self.config = config
        self.stream = stream
        self.token_positions = token_positions
        self.blocks = stack(block, config, rngs.params())
        self.embed = Embed(config, rngs=rngs)
        self.final_norm = RMSNorm(config.features, config.kernels)
        self.head = None if config.tied else Head(config, rngs=rngs)

    def __call__(self, tokens_BS: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Logits [B, S, V] of the token after each position; a `key` enables dropout."""
        return self.after_blocks(self._after_last_block(tokens_BS, key))

    def cross_entropy(self, tokens_BS: jax.Array, targets_BS: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Mean cross entropy in nats of the targets; where kernels run, logits are not stored."""
        if not kernels.runs_kernels(self.config.kernels):
            return loss(self(tokens_BS, key), targets_BS)
        x_BSM = self.stream.branch_input(self.final_norm(self._after_last_block(tokens_BS, key)))
        losses: Any = kernels.linear_cross_entropy(
            x_BSM,
            self._output_table(x_BSM.dtype),
            targets_BS,
            transposed=True,
            implementation=self.config.kernels,
        )
        return jnp.mean(losses)

    def _after_last_block(self, tokens_BS: jax.Array, key: jax.Array | None) -> jax.Array:
        if tokens_BS.shape[1] > self.config.context:
            raise ValueError(
                f"GPT: {tokens_BS.shape[1]} tokens in a sequence exceed the context of {self.config.context}"
            )
        keys = (None, None) if key is None else jax.random.split(key)
        start = 0 if self.token_positions is None else self.token_positions(tokens_BS.shape[1])
        x_BSM = self.before_blocks(tokens_BS, start, keys[0])
        return run(self.blocks, x_BSM, keys[1], self.config)

    def before_blocks(
        self, tokens_BS: jax.Array, start: jax.Array | int = 0, key: jax.Array | None = None
    ) -> jax.Array:
        """The input x_BSM of the first block; token positions begin at `start`, or are `start` [S]."""
        return dropout(self.stream.branch_output(self.embed(tokens_BS, start)), self.config.dropout, key)

    def past(self, batch: int, length: int | None = None) -> KVCache:
        """An empty cache for a block's `continued`: preallocated for `length` tokens, or growing."""
        config = self.config
        empty_BTGD = jnp.zeros((batch, length or 0, config.kv_heads, config.head_features), config.dtype)
        return KVCache(empty_BTGD, empty_BTGD, None if length is None else jnp.zeros((), jnp.int32))

    def after_blocks(self, x_BSM: jax.Array) -> jax.Array:
        """Logits [B, S, V] from the last block's output."""
        x_BSM = self.stream.branch_input(self.final_norm(x_BSM))
        return jnp.einsum("BSM,VM->BSV", x_BSM, self._output_table(x_BSM.dtype))

    def _output_table(self, dtype: Any) -> jax.Array:
        return (self.embed if self.head is None else self.head).table[...].astype(dtype)


def next_token_loss(model: GPT, tokens: jax.Array, key: jax.Array | None = None) -> jax.Array:
    """Mean next-token cross entropy in nats per token, of tokens [B, S + 1]."""
    return model.cross_entropy(tokens[:, :-1], tokens[:, 1:], key)


def num_params(model: nnx.Module) -> int:
    """Number of scalar parameters of a model, concrete or abstract."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
