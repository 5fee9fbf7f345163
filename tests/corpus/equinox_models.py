"""Equinox: language models, MLPs and recurrent nets from `eqx.nn`, trained by `eqx.filter_value_and_grad`.

Shape suffixes: B batch, S sequence, M features, H heads, D features of a head.
"""

from __future__ import annotations

from collections.abc import Callable
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

PACKAGE = "equinox"


def is_shape(x: Any) -> bool:
    """Whether a leaf of an abstract model is an array."""
    return isinstance(x, jax.ShapeDtypeStruct)


def equinox_step(make: Callable[..., Any], loss: Any, batch: Any, sizes: Sizes, weights: Any) -> Step:
    """A train step in Equinox's way: the arrays of the model are its state, everything else is static.

    Args:
        make: key -> model.
        loss: (model, *batch) -> mean loss.
        batch: shapes.
        sizes: the mesh.
        weights: (abstract arrays of the model, sizes) -> their specs.
    """
    arrays, static = eqx.partition(eqx.filter_eval_shape(make, KEY), is_shape)
    optimizer = optax.adamw(3e-4)

    def run(state: Any, *batch: Any) -> Any:
        model, optimizer_state = eqx.combine(state[0], static), state[1]
        value, gradient = eqx.filter_value_and_grad(loss)(model, *batch)
        trainable = eqx.filter(model, eqx.is_inexact_array)
        updates, optimizer_state = optimizer.update(gradient, optimizer_state, trainable)
        return (eqx.filter(eqx.apply_updates(model, updates), eqx.is_array), optimizer_state), value

    state = arrays, jax.eval_shape(optimizer.init, arrays)
    batch_spec = tuple(batch_specs(b, sizes) for b in batch)
    return Step(run=run, args=(state, *batch), specs=((weights(arrays, sizes), None), *batch_spec))


class Block(eqx.Module):
    """A decoder's block with rotary embeddings."""

    norm1: eqx.nn.RMSNorm
    attention: eqx.nn.MultiheadAttention
    rotary: eqx.nn.RotaryPositionalEmbedding
    norm2: eqx.nn.RMSNorm
    mlp: eqx.nn.MLP

    def __init__(self, features: int, heads: int, key: jax.Array) -> None:
        k1, k2 = jax.random.split(key)
        self.norm1, self.norm2 = eqx.nn.RMSNorm(features), eqx.nn.RMSNorm(features)
        self.attention = eqx.nn.MultiheadAttention(heads, features, key=k1)
        self.rotary = eqx.nn.RotaryPositionalEmbedding(features // heads)
        self.mlp = eqx.nn.MLP(features, features, 4 * features, 1, jax.nn.gelu, key=k2)

    def __call__(self, x_SM: jax.Array) -> jax.Array:
        def rotate(q_SHD: jax.Array, k_SHD: jax.Array, v_SHD: jax.Array) -> tuple[jax.Array, ...]:
            turn = jax.vmap(self.rotary, in_axes=1, out_axes=1)
            return turn(q_SHD), turn(k_SHD), v_SHD

        h = jax.vmap(self.norm1)(x_SM)
        mask = jnp.tril(jnp.ones((len(h), len(h)), bool))
        x_SM = x_SM + self.attention(h, h, h, mask, process_heads=rotate)
        return x_SM + jax.vmap(self.mlp)(jax.vmap(self.norm2)(x_SM))


class Decoder(eqx.Module):
    """A language model over stacked blocks."""

    embedding: eqx.nn.Embedding
    blocks: Block
    norm: eqx.nn.RMSNorm
    head: eqx.nn.Linear

    def __init__(self, vocab: int, features: int, heads: int, layers: int, key: jax.Array) -> None:
        k1, k2, k3 = jax.random.split(key, 3)
        self.embedding = eqx.nn.Embedding(vocab, features, key=k1)
        self.blocks = eqx.filter_vmap(partial(Block, features, heads))(jax.random.split(k2, layers))
        self.norm = eqx.nn.RMSNorm(features)
        self.head = eqx.nn.Linear(features, vocab, use_bias=False, key=k3)

    def __call__(self, tokens_S: jax.Array, *, remat: bool) -> jax.Array:
        layers, static = eqx.partition(self.blocks, eqx.is_array)

        def body(x_SM: jax.Array, layer: Any) -> Any:
            return eqx.combine(layer, static)(x_SM), None

        x_SM, _ = jax.lax.scan(jax.checkpoint(body) if remat else body, jax.vmap(self.embedding)(tokens_S), layers)
        return jax.vmap(self.head)(jax.vmap(self.norm)(x_SM))


def next_token_loss(model: Decoder, tokens_BS: jax.Array, *, remat: bool = True, half: bool = True) -> jax.Array:
    """The mean cross-entropy of each next token."""
    model = bfloat16(model) if half else model
    logits = jax.vmap(partial(model, remat=remat))(tokens_BS[:, :-1]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens_BS[:, 1:]).mean()


class RecurrentClassifier(eqx.Module):
    """A cell scanned over a sequence, and a linear head."""

    cell: eqx.nn.GRUCell | eqx.nn.LSTMCell
    head: eqx.nn.Linear

    def __init__(self, cell: Any, inputs: int, hidden: int, classes: int, key: jax.Array) -> None:
        k1, k2 = jax.random.split(key)
        self.cell = cell(inputs, hidden, key=k1)
        self.head = eqx.nn.Linear(hidden, classes, key=k2)

    def __call__(self, x_SM: jax.Array) -> jax.Array:
        zero = jnp.zeros(self.cell.hidden_size)
        is_gru = isinstance(self.cell, eqx.nn.GRUCell)
        carry, _ = jax.lax.scan(lambda c, x: (self.cell(x, c), None), zero if is_gru else (zero, zero), x_SM)
        return self.head(carry if is_gru else carry[0])


def classifier_loss(model: Any, x: jax.Array, label: jax.Array) -> jax.Array:
    """The mean cross-entropy of each row's label."""
    return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(x), label).mean()


def squared_loss(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """The mean squared error."""
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


# Linear weights are [out, in].
MEGATRON: Rules = (
    ("embedding/weight", P("model", "fsdp")),
    ("head/weight", P("model", "fsdp")),
    ("*/output_proj/weight", P("fsdp", "model")),
    ("*_proj/weight", P("model", "fsdp")),
    ("*/mlp/layers/0/weight", P("model", "fsdp")),
    ("*/mlp/layers/0/bias", P("model")),
    ("*/mlp/layers/1/weight", P("fsdp", "model")),
)
ALTERNATING: Rules = (("layers/[02468]/weight", P("model", None)), ("layers/[1357]/weight", P(None, "model")))
GATES: Rules = (("cell/weight_?h", P("model", None)), ("cell/bias*", P("model")))


def decoder(sizes: Sizes, *, features: int, heads: int, layers: int, rows: int, weights: Any, **options: bool) -> Step:
    """A decoder with a vocabulary of 32,768 and a context of 1,024."""
    make = partial(Decoder, 32768, features, heads, layers)
    return equinox_step(make, partial(next_token_loss, **options), (ints(rows, 1025),), sizes, weights)


def recurrent(cell: Any, hidden: int, weights: Any, sizes: Sizes) -> Step:
    """A recurrent classifier over 256 steps of 512 features."""
    batch = floats(128, 256, 512), ints(128)
    return equinox_step(partial(RecurrentClassifier, cell, 512, hidden, 1000), classifier_loss, batch, sizes, weights)


def mlp(sizes: Sizes) -> Step:
    """A wide MLP, alternately sharded over its columns and rows."""
    batch = floats(1024, 2048), floats(1024, 2048)
    make = partial(eqx.nn.MLP, 2048, 2048, 8192, 8, jax.nn.relu)
    return equinox_step(lambda key: make(key=key), squared_loss, batch, sizes, partial(specs_by, ALTERNATING))


BIG = {"features": 2048, "heads": 16, "layers": 16}
SMALL = {"features": 768, "heads": 12, "layers": 8}

PROGRAMS: dict[str, MakeProgram] = {
    "decoder, megatron": partial(decoder, **BIG, rows=8, weights=partial(specs_by, MEGATRON)),
    "decoder, fsdp": partial(decoder, **BIG, rows=8, weights=largest_dim),
    "decoder, data": partial(decoder, **SMALL, rows=8, weights=replicated, remat=False, half=False),
    "mlp": mlp,
    "gru": partial(recurrent, eqx.nn.GRUCell, 4096, partial(specs_by, GATES)),
    "lstm": partial(recurrent, eqx.nn.LSTMCell, 4096, largest_dim),
}
