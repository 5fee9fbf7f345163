"""Flax nnx: decoders from its attention and linear modules, with layers in a list or scanned, dropout and a cache.

Shape suffixes: B batch, S sequence, M features.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from support.train_steps.step import Sizes, Step

from sharding import P

from . import MakeProgram
from .common import batch_specs, ints, largest_dim, renamed, replicated
from .nnx_training import Weights, shapes, stateful

PACKAGE = "flax"

RULES = (("vocab", "model"), ("heads", "model"), ("mlp", "model"), ("embed", "fsdp"))
"""A logical axis and the mesh axis that it is sharded over."""


def placed(*axes: str, init: Any = None) -> Any:
    """An initializer with logical axes, which places no array itself."""
    init = init or nnx.initializers.lecun_normal()
    return nnx.with_partitioning(init, axes, sharding_rules=RULES, eager_sharding=False)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes and switches of a decoder."""

    vocab: int = 50304
    features: int = 768
    heads: int = 12
    layers: int = 12
    context: int = 1024
    dtype: Any = jnp.bfloat16
    dropout: float = 0.0
    scan: bool = False
    remat: bool = False


class Block(nnx.Module):
    """A block of a decoder, with a gated MLP."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        linear = partial(nnx.Linear, use_bias=False, dtype=config.dtype, rngs=rngs)
        up, down = placed("embed", "mlp"), placed("mlp", "embed")
        self.norm1 = nnx.RMSNorm(config.features, dtype=config.dtype, rngs=rngs)
        self.norm2 = nnx.RMSNorm(config.features, dtype=config.dtype, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            config.heads,
            config.features,
            dtype=config.dtype,
            use_bias=False,
            decode=False,
            deterministic=False,
            dropout_rate=config.dropout,
            kernel_init=placed("embed", "heads", "head"),
            out_kernel_init=placed("heads", "head", "embed"),
            rngs=rngs,
        )
        self.gate = linear(config.features, 4 * config.features, kernel_init=up)
        self.up = linear(config.features, 4 * config.features, kernel_init=up)
        self.down = linear(4 * config.features, config.features, kernel_init=down)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)

    def __call__(self, x_BSM: jax.Array, mask: jax.Array | None, decode: bool = False) -> jax.Array:
        x_BSM = x_BSM + self.attention(self.norm1(x_BSM), mask=mask, decode=decode)
        h = self.norm2(x_BSM)
        return x_BSM + self.dropout(self.down(nnx.silu(self.gate(h)) * self.up(h)))


class Decoder(nnx.Module):
    """A language model with learned positions and a head."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        c = self.config = config
        table = placed("vocab", "embed", init=nnx.initializers.normal(0.02))
        self.embedding = nnx.Embed(c.vocab, c.features, dtype=c.dtype, embedding_init=table, rngs=rngs)
        self.position = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (c.context, c.features)))
        if c.scan:
            make = nnx.vmap(Block, in_axes=(None, 0), transform_metadata={nnx.PARTITION_NAME: None})
            self.blocks = nnx.split_rngs(splits=c.layers)(make)(c, rngs)
        else:
            self.blocks = nnx.List([Block(c, rngs) for _ in range(c.layers)])
        self.norm = nnx.RMSNorm(c.features, dtype=c.dtype, rngs=rngs)
        head = placed("embed", "vocab")
        self.head = nnx.Linear(c.features, c.vocab, use_bias=False, dtype=c.dtype, kernel_init=head, rngs=rngs)

    def __call__(self, tokens_BS: jax.Array, decode: bool = False) -> jax.Array:
        def layer(x_BSM: jax.Array, block: Block) -> jax.Array:
            return block(x_BSM, None if decode else nnx.make_causal_mask(tokens_BS), decode)

        layer = nnx.remat(layer) if self.config.remat else layer
        x_BSM = self.embedding(tokens_BS) + self.position[: tokens_BS.shape[1]].astype(self.config.dtype)
        if self.config.scan:
            x_BSM = nnx.scan(layer, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x_BSM, self.blocks)
        else:
            for block in self.blocks:
                x_BSM = layer(x_BSM, block)
        return self.head(self.norm(x_BSM))


def next_token_loss(model: Decoder, tokens_BS: jax.Array) -> jax.Array:
    """The mean cross-entropy of each next token."""
    logits = model(tokens_BS)[:, :-1].astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens_BS[:, 1:]).mean()


def trainer(config: Config) -> dict[str, Any]:
    """A decoder and its optimizer."""
    model = Decoder(config, nnx.Rngs(0))
    return {"model": model, "optimizer": nnx.Optimizer(model, optax.adamw(3e-4), wrt=nnx.Param)}


def update(node: dict[str, Any], tokens_BS: jax.Array) -> jax.Array:
    """The loss; the decoder and optimizer are updated."""
    value, gradients = nnx.value_and_grad(next_token_loss)(node["model"], tokens_BS)
    node["optimizer"].update(node["model"], gradients)
    return value


def trained(config: Config, rows: int, sizes: Sizes, weights: Weights | None = None) -> Step:
    """The train step of `nnx.value_and_grad` and `nnx.Optimizer`."""
    return stateful(partial(trainer, config), update, (ints(rows, config.context),), sizes, weights=weights)


def decoded(config: Config, rows: int, sizes: Sizes) -> Step:
    """A token of each row, whose keys and values are the state."""

    def make() -> Decoder:
        model = Decoder(config, nnx.Rngs(0))
        for block in model.blocks:
            block.attention.init_cache((rows, config.context, config.features), dtype=config.dtype)
        return model

    graph, cache, params = nnx.split(shapes(make), nnx.Cache, ...)
    own = renamed(nnx.to_pure_dict(nnx.get_partition_spec(params)), nnx.to_pure_dict(params), sizes)
    cache, params = nnx.to_pure_dict(cache), nnx.to_pure_dict(params)

    def run(cache: Any, params: Any, tokens_BS: jax.Array) -> Any:
        model = nnx.merge(graph, cache, params)
        logits = model(tokens_BS, decode=True)
        return nnx.to_pure_dict(nnx.state(model, nnx.Cache)), jnp.argmax(logits[:, -1], axis=-1)

    tokens, heads = ints(rows, 1), P(("data", "fsdp"), None, "model")
    return Step(
        run=run,
        args=(cache, params, tokens),
        specs=(batch_specs(cache, sizes, heads), own, batch_specs(tokens, sizes)),
    )


WIDE = Config(features=1600, heads=25, layers=10)
LARGE = Config(features=2048, heads=16, layers=16)

PROGRAMS: dict[str, MakeProgram] = {
    "nnx decoder, remat": partial(trained, Config(remat=True), 32),
    "nnx decoder, float32, dropout, data": partial(
        trained, Config(dtype=jnp.float32, dropout=0.1, layers=6, context=512), 16, weights=replicated
    ),
    "nnx decoder, fsdp": partial(trained, replace(WIDE, remat=True), 8, weights=largest_dim),
    "nnx decoder, scanned, remat": partial(trained, replace(LARGE, scan=True, remat=True, dropout=0.1), 16),
    "nnx decoder, scanned, fsdp": partial(trained, replace(WIDE, scan=True, remat=True), 8, weights=largest_dim),
    "nnx decoder, cached": partial(decoded, LARGE, 64),
}
