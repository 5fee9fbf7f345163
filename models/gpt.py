"""A GPT: a causal transformer over tokens, as plain flax nnx modules without any sharding.

Made of the blocks of `transformer`, whose header says what is unusual about them: RMS norms before each branch, rotary
or learned positions, by default no biases.

Shape suffixes as there, and V vocabulary.
"""

import dataclasses
import math
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from .transformer import (
    MLP,
    PLAIN,
    Attend,
    Attention,
    Block,
    Branch,
    Order,
    Past,
    RMSNorm,
    Stream,
    causal_attention,
    common_mistakes,
    dropout,
    loss,
    normal,
    rotate,
    run,
    stack,
)

__all__ = [
    "GPT",
    "MLP",
    "PRESETS",
    "Attend",
    "Attention",
    "Block",
    "Branch",
    "Config",
    "Embed",
    "Head",
    "LanguageModel",
    "Past",
    "RMSNorm",
    "Stream",
    "causal_attention",
    "dropout",
    "generate",
    "loss",
    "next_token_loss",
    "num_params",
    "rotate",
]


SIZES = ("vocab", "context", "layers", "features", "heads", "kv_heads", "mlp_features")
"""The fields of `Config` that are at least 1."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The sizes of a model and how it is computed; mistakes are all reported together."""

    vocab: int
    """Number of different tokens."""
    context: int
    """Longest sequence."""
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
    """Where positions enter: queries and keys are rotated, or a learned table is added to the embedding."""
    tied: bool = True
    """Whether the embedding table also makes the logits; otherwise the head has its own."""
    biases: bool = False
    """Whether projections add a bias."""
    scan: bool = False
    """Whether layers are stacked and scanned, which compiles one block for any depth, or unrolled."""
    remat: bool = False
    """Whether blocks are computed again in the backward pass, all but their attention output."""
    dropout: float = 0.0
    """Share of the embedding and of each branch's output that is dropped when the call is given a key."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of activations; parameters, norms and softmax stay in float32."""

    def __post_init__(self):
        wrong = common_mistakes(self, SIZES)
        if wrong:
            raise ValueError("gpt.Config: " + "; ".join(wrong))

    @property
    def head_features(self) -> int:
        return self.features // self.heads


# A vocabulary of 50,304 is GPT-2's 50,257 rounded up to a multiple of 128, so that axes divide it.
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
    """tokens_BS, start -> x_BSM: a row of the table for each token, plus one for its position if positions are learned.

    The first token's position is `start`, or each token's is that of `start` [S].
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
    """The table that makes logits, laid out as the embedding's, which takes its place when they are tied."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.table = normal(rngs, (config.vocab, config.features), fan_in=config.features)


class GPT(nnx.Module):
    """The whole model: tokens_BS -> logits_BSV.

    Args:
        config: its sizes.
        rngs: its `params` stream gives the initial values.
        attention, mlp: make the two branches of a block. For another attention between the same projections:
            `functools.partial(Attention, attend=...)`.
        stream: what is done between the residual stream and the branches.
        order: the positions of sequences that come in another order; the attention is given them too.
    """

    def __init__(
        self,
        config: Config,
        *,
        rngs: nnx.Rngs,
        attention: Branch = Attention,
        mlp: Branch = MLP,
        stream: Stream = PLAIN,
        order: Order | None = None,
    ):
        def block(key: jax.Array) -> Block:
            return Block(config, rngs=nnx.Rngs(params=key), attention=attention, mlp=mlp, stream=stream)

        self.config = config
        self.stream = stream
        self.order = order
        self.blocks = stack(block, config, rngs.params())
        self.embed = Embed(config, rngs=rngs)
        self.final_norm = RMSNorm(config.features)
        self.head = None if config.tied else Head(config, rngs=rngs)

    def __call__(self, tokens_BS: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Logits [B, S, V] of the token after each position; a `key` turns dropout on."""
        if tokens_BS.shape[1] > self.config.context:
            raise ValueError(f"GPT: {tokens_BS.shape[1]} tokens in a sequence, the context is {self.config.context}")
        keys = (None, None) if key is None else jax.random.split(key)
        start = 0 if self.order is None else self.order(tokens_BS.shape[1])
        x_BSM = self.before_blocks(tokens_BS, start, keys[0])
        return self.after_blocks(run(self.blocks, x_BSM, keys[1], self.config))

    def before_blocks(
        self, tokens_BS: jax.Array, start: jax.Array | int = 0, key: jax.Array | None = None
    ) -> jax.Array:
        """What the first block gets, x_BSM, of tokens whose positions begin at `start`, or are `start` [S]."""
        return dropout(self.stream.out_of(self.embed(tokens_BS, start)), self.config.dropout, key)

    def past(self, batch: int, length: int | None = None) -> Past:
        """What a block's `continued` gets with a sequence's first tokens; with room for so many, or growing."""
        config = self.config
        none_BTGD = jnp.zeros((batch, length or 0, config.kv_heads, config.head_features), config.dtype)
        return Past(none_BTGD, none_BTGD, None if length is None else jnp.zeros((), jnp.int32))

    def after_blocks(self, x_BSM: jax.Array) -> jax.Array:
        """The logits [B, S, V] of what the last block made."""
        x_BSM = self.stream.into(self.final_norm(x_BSM))
        table_VM = (self.embed if self.head is None else self.head).table[...]
        return jnp.einsum("BSM,VM->BSV", x_BSM, table_VM.astype(x_BSM.dtype))


def next_token_loss(model: GPT, tokens: jax.Array, key: jax.Array | None = None) -> jax.Array:
    """Mean nats per token of predicting tokens [B, S + 1] from their first S."""
    return loss(model(tokens[:, :-1], key), tokens[:, 1:])


def num_params(model: nnx.Module) -> int:
    """Number of scalars in the parameters, also of an abstract model."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


class LanguageModel(Protocol):
    """What generates: tokens_BS -> logits_BSV, up to as many tokens as its configuration has context."""

    config: Any

    def __call__(self, tokens_BS: jax.Array) -> jax.Array: ...


def generate(
    model: LanguageModel, prompt_BS: jax.Array, *, steps: int, key: jax.Array, temperature: float = 1.0
) -> jax.Array:
    """The prompt and `steps` sampled tokens, [B, S + steps]; temperature 0 takes the likeliest.

    Every step runs the whole model on the last `context` tokens: no cache.
    """
    batch, length = prompt_BS.shape
    width = min(model.config.context, length + steps)

    def step(i: jax.Array, tokens: jax.Array) -> jax.Array:
        start = jnp.maximum(i - width, 0)
        window_BS = jax.lax.dynamic_slice_in_dim(tokens, start, width, axis=1)
        # What lies after the last token is not seen, attention is causal.
        logits_BV = jax.lax.dynamic_index_in_dim(model(window_BS), i - 1 - start, axis=1, keepdims=False)
        next_B = _sample(logits_BV.astype(jnp.float32), jax.random.fold_in(key, i), temperature)
        return jax.lax.dynamic_update_slice_in_dim(tokens, next_B.astype(tokens.dtype)[:, None], i, axis=1)

    tokens = jnp.concatenate([prompt_BS, jnp.zeros((batch, steps), prompt_BS.dtype)], axis=1)
    return jax.lax.fori_loop(length, length + steps, step, tokens)


def _sample(logits_BV: jax.Array, key: jax.Array, temperature: float) -> jax.Array:
    if temperature == 0:
        return jnp.argmax(logits_BV, axis=-1)
    return jax.random.categorical(key, logits_BV / temperature, axis=-1)
