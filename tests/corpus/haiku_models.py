"""Haiku: transformers, stacked by `layer_stack` with `hk.remat` or unrolled, and a recurrent language model.

Shape suffixes: B batch, T time, M features.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import optax
from support.train_steps.step import Sizes, Step

from sharding import P

from . import MakeProgram
from .common import KEY, Rules, bfloat16, ints, largest_dim, replicated, specs, training

PACKAGE = "dm-haiku"
VOCAB = 32768


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean in float32."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


class Block(hk.Module):
    """Attention and an MLP, each after a layer norm and followed by dropout."""

    def __init__(self, heads: int, layers: int, name: str | None = None) -> None:
        super().__init__(name)
        self.heads = heads
        self.init = hk.initializers.VarianceScaling(2 / layers)

    def __call__(self, x_BTM: jax.Array) -> jax.Array:
        features, length = x_BTM.shape[-1], x_BTM.shape[1]
        mask = jnp.tril(jnp.ones((1, 1, length, length)))
        norm = partial(hk.LayerNorm, -1, True, True)
        h = norm(name="norm1")(x_BTM)
        attention = hk.MultiHeadAttention(self.heads, features // self.heads, w_init=self.init, name="attention")
        x_BTM = x_BTM + hk.dropout(hk.next_rng_key(), 0.1, attention(h, h, h, mask=mask))
        h = jax.nn.gelu(hk.Linear(4 * features, w_init=self.init, name="up")(norm(name="norm2")(x_BTM)))
        return x_BTM + hk.dropout(hk.next_rng_key(), 0.1, hk.Linear(features, w_init=self.init, name="down")(h))


def language_model(tokens_BT: jax.Array, *, features: int, heads: int, layers: int, stacked: bool) -> jax.Array:
    """Logits of a transformer; its layers are stacked and scanned with remat, or unrolled."""
    embedding = hk.Embed(VOCAB, features, name="embedding")
    positions = hk.get_parameter("positions", [tokens_BT.shape[1], features], init=jnp.zeros)
    x_BTM = embedding(tokens_BT) + positions
    if stacked:
        x_BTM = hk.experimental.layer_stack(layers)(hk.remat(lambda x: Block(heads, layers, "block")(x)))(x_BTM)
    else:
        for _ in range(layers):
            x_BTM = Block(heads, layers)(x_BTM)
    return hk.Linear(VOCAB, name="head")(hk.LayerNorm(-1, True, True)(x_BTM))


def transformer(sizes: Sizes, *, rows: int, weights: Any, half: bool = False, **config: Any) -> Step:
    """The train step of a language model with a context of 1,024."""
    model = hk.transform(partial(language_model, **config))

    def loss(params: Any, tokens: jax.Array, key: jax.Array) -> jax.Array:
        logits = model.apply(bfloat16(params) if half else params, key, tokens[:, :-1])
        return cross_entropy(logits, tokens[:, 1:])

    params = jax.eval_shape(model.init, KEY, ints(rows, 1024))
    optimizer = optax.chain(optax.clip_by_global_norm(1), optax.adamw(3e-4))
    return training(loss, params, (ints(rows, 1025), KEY), sizes, weights=weights(params, sizes), optimizer=optimizer)


def recurrent_language_model(tokens_BT: jax.Array, hidden: int, layers: int) -> jax.Array:
    """Logits of stacked LSTMs with skip connections, unrolled over time by a scan."""
    core = hk.deep_rnn_with_skip_connections([hk.LSTM(hidden) for _ in range(layers)])
    x = hk.BatchApply(hk.Embed(VOCAB, hidden))(tokens_BT.T)
    outputs, _ = hk.dynamic_unroll(core, x, core.initial_state(len(tokens_BT)))
    return hk.BatchApply(hk.Linear(VOCAB, name="head"))(outputs).swapaxes(0, 1)


def lstm(sizes: Sizes) -> Step:
    """The train step of a recurrent language model with a context of 256."""
    model = hk.without_apply_rng(hk.transform(partial(recurrent_language_model, hidden=2048, layers=3)))
    params = jax.eval_shape(model.init, KEY, ints(32, 256))

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        return cross_entropy(model.apply(params, tokens[:, :-1]), tokens[:, 1:])

    return training(loss, params, (ints(32, 257),), sizes, weights=specs(params, GATES, sizes))


# Linear weights are [in, out].
MEGATRON: Rules = (
    ("embedding/embeddings", P("model", "fsdp")),
    ("head/w", P("fsdp", "model")),
    ("*/attention/linear/w", P("model", "fsdp")),
    ("*/attention/*/w", P("fsdp", "model")),
    ("*/up/w", P("fsdp", "model")),
    ("*/down/w", P("model", "fsdp")),
)
GATES: Rules = (("*lstm*/linear/w", P(None, "model")), ("*lstm*/linear/b", P("model")), ("head/w", P(None, "model")))
LARGE = {"features": 2048, "heads": 16, "layers": 16, "stacked": True}
BASE = {"features": 768, "heads": 12, "layers": 10, "stacked": False}


def megatron(params: Any, sizes: Sizes) -> Any:
    """Tensor parallelism, and FSDP over the other dim."""
    return specs(params, MEGATRON, sizes)


PROGRAMS: dict[str, MakeProgram] = {
    "transformer, megatron, scanned, remat": partial(transformer, **LARGE, rows=16, weights=megatron, half=True),
    "transformer, fsdp, scanned, remat": partial(transformer, **LARGE, rows=8, weights=largest_dim),
    "transformer, data": partial(transformer, **BASE, rows=8, weights=replicated),
    "lstm, deep": lstm,
}
