"""AQT: a transformer whose dots and einsums are quantized, in training and in serving with converted weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from aqt.jax.v2 import config
from aqt.jax.v2.flax.aqt_flax import AqtDotGeneral, AqtEinsum, FreezerMode
from aqt.jax.v2.utils import QuantMode
from support.train_steps.step import Sizes, Step

from sharding import P

from . import MakeProgram
from .common import KEY, Rules, batch_specs, ints, largest_dim, specs, training

PACKAGE = "aqtp"
VOCAB = 32768


class Block(nn.Module):
    """Causal attention and an MLP; weights and, in einsums, queries, keys and values are quantized."""

    heads: int
    dense: Any
    einsum: Any

    @nn.compact
    def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        features, length = x.shape[-1], x.shape[1]
        h = nn.RMSNorm(name="norm1")(x)
        q, k, v = (
            self.dense(features, name=name)(h).reshape(*h.shape[:2], self.heads, -1)
            for name in ("query", "key", "value")
        )
        scores = self.einsum(name="scores")("bqhd,bkhd->bhqk", q, k) / (features // self.heads) ** 0.5
        mask = jnp.tril(jnp.ones((length, length), bool))
        weights = nn.softmax(jnp.where(mask, scores, jnp.finfo(scores.dtype).min))
        mixed = self.einsum(name="mixed")("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
        x = x + self.dense(features, name="out")(mixed)
        h = nn.gelu(self.dense(4 * features, name="up")(nn.RMSNorm(name="norm2")(x)))
        return x + self.dense(features, name="down")(h), None


class Transformer(nn.Module):
    """A language model of scanned layers; embedding and head are not quantized."""

    features: int
    layers: int
    quantization: Any
    mode: QuantMode = QuantMode.TRAIN
    remat: bool = True

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        freeze = FreezerMode.NONE if self.mode is QuantMode.TRAIN else FreezerMode.CALIBRATION_AND_VALUE
        dot = partial(
            AqtDotGeneral,
            self.quantization,
            rhs_quant_mode=self.mode,
            rhs_freeze_mode=freeze,
            use_legacy_freezer=False,
        )
        dense = partial(nn.Dense, use_bias=False, dtype=jnp.bfloat16, dot_general_cls=dot)
        block = nn.remat(Block, prevent_cse=False) if self.remat else Block
        stack = nn.scan(
            block,
            variable_axes={"params": 0, "aqt": 0},
            split_rngs={"params": True},
            length=self.layers,
        )
        x = nn.Embed(VOCAB, self.features, dtype=jnp.bfloat16, name="embedding")(tokens)
        x, _ = stack(self.features // 128, dense, partial(AqtEinsum, self.quantization), name="blocks")(x, None)
        return nn.Dense(VOCAB, use_bias=False, dtype=jnp.bfloat16, name="head")(nn.RMSNorm(name="norm")(x))


def train(sizes: Sizes, *, features: int, layers: int, quantization: Any, weights: Any, remat: bool = True) -> Step:
    """The train step with a context of 1,024; stochastic rounding takes a key."""
    model = Transformer(features, layers, quantization, remat=remat)
    params = jax.eval_shape(model.init, KEY, ints(8, 1024))["params"]

    def loss(params: Any, tokens: jax.Array, key: jax.Array) -> jax.Array:
        logits = model.apply({"params": params}, tokens[:, :-1], rngs={"params": key}).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return training(loss, params, (ints(8, 1025), KEY), sizes, weights=weights(params, sizes))


def serve(sizes: Sizes, *, features: int, layers: int) -> Step:
    """The logits of prompts, with weights in eight bits."""
    make = partial(Transformer, features, layers, config.config_v4(), remat=False)
    prompts = ints(16, 512)
    converted = jax.eval_shape(lambda key, x: make(QuantMode.CONVERT).init(key, x), KEY, prompts)
    variables = {"aqt": converted["aqt"], "params": unquantized(converted["params"])}
    served = make(QuantMode.SERVE)

    def run(prompts: jax.Array, variables: Any, key: jax.Array) -> jax.Array:
        return served.apply(variables, prompts, rngs={"params": key})[:, -1]

    spec = specs(variables, MEGATRON, sizes)
    return Step(run=run, args=(prompts, variables, KEY), specs=(batch_specs(prompts, sizes), spec, None))


def unquantized(params: Any) -> Any:
    """The parameters in bfloat16, as shapes."""
    return jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.bfloat16), params)


MEGATRON: Rules = (
    ("*embedding/embedding", P("model", "fsdp")),
    ("*head/kernel", P("fsdp", "model")),
    ("*/out/*", P("model", "fsdp")),
    ("*/down/*", P("model", "fsdp")),
    ("*/kernel", P("fsdp", "model")),
    ("aqt/*", P("fsdp", "model")),
)


def megatron(params: Any, sizes: Sizes) -> Any:
    """Tensor parallelism, and FSDP over the other dim."""
    return specs(params, MEGATRON, sizes)


PROGRAMS: dict[str, MakeProgram] = {
    "int8, megatron": partial(
        train, features=2048, layers=12, quantization=config.fully_quantized(fwd_bits=8, bwd_bits=8), weights=megatron
    ),
    "int8 forward, fsdp": partial(
        train, features=1024, layers=12, quantization=config.config_v4(dlhs_bits=None), weights=largest_dim, remat=False
    ),
    "fp8, megatron": partial(train, features=2048, layers=12, quantization=config.config_fwd_fp8(), weights=megatron),
    "int8, serving": partial(serve, features=4096, layers=16),
}
