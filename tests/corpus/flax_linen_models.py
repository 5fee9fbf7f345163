"""Flax linen: the language model and translator of its examples, with logical axes, scanned layers, dropout and caches.

Shape suffixes: B batch, S sequence, M features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training import common_utils, train_state
from support.train_steps.step import Sizes, Step

from sharding import P

from . import MakeProgram
from .common import KEY, batch_specs, ints, renamed

PACKAGE = "flax"

LogicalRules = tuple[tuple[str, str | None], ...]
MEGATRON: LogicalRules = (("vocab", "model"), ("heads", "model"), ("mlp", "model"), ("embed", "fsdp"), ("layers", None))
FSDP: LogicalRules = (("vocab", None), ("heads", None), ("mlp", None), ("embed", "fsdp"), ("layers", None))
DATA: LogicalRules = (("vocab", None), ("heads", None), ("mlp", None), ("embed", None), ("layers", None))


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes and switches of a transformer."""

    vocab: int = 32768
    features: int = 1024
    heads: int = 16
    mlp: int = 4096
    layers: int = 12
    context: int = 512
    dtype: Any = jnp.bfloat16
    dropout: float = 0.1
    scan: bool = False
    remat: bool = False
    decode: bool = False


def placed(*axes: str) -> Callable[..., Any]:
    """An initializer with logical axes."""
    return nn.with_logical_partitioning(nn.initializers.xavier_uniform(), axes)


class Attention(nn.Module):
    """Attention with dropout."""

    config: Config

    @nn.compact
    def __call__(self, q_BSM: jax.Array, kv_BSM: jax.Array, mask: Any, train: bool, decode: bool = False) -> jax.Array:
        attend = nn.MultiHeadDotProductAttention(
            num_heads=self.config.heads,
            dtype=self.config.dtype,
            kernel_init=placed("embed", "heads", "kv"),
            out_kernel_init=placed("heads", "kv", "embed"),
            use_bias=False,
            dropout_rate=self.config.dropout,
            decode=decode,
        )
        return attend(q_BSM, kv_BSM, mask=mask, deterministic=not train)


class MLP(nn.Module):
    """Two dense layers."""

    config: Config

    @nn.compact
    def __call__(self, x_BSM: jax.Array, train: bool) -> jax.Array:
        dense = partial(nn.Dense, dtype=self.config.dtype)
        h = nn.relu(dense(self.config.mlp, kernel_init=placed("embed", "mlp"))(x_BSM))
        h = nn.Dropout(self.config.dropout)(h, deterministic=not train)
        return dense(self.config.features, kernel_init=placed("mlp", "embed"))(h)


class Block(nn.Module):
    """A block of a decoder, or of an encoder without a mask; a scan's body."""

    config: Config
    train: bool

    @nn.compact
    def __call__(self, x_BSM: jax.Array, mask: Any = None, encoded: Any = None) -> tuple[jax.Array, None]:
        norm, attention = partial(nn.LayerNorm, dtype=self.config.dtype), partial(Attention, self.config)
        h = norm()(x_BSM)
        x_BSM = x_BSM + attention()(h, h, mask, self.train, self.config.decode)
        if encoded is not None:
            x_BSM = x_BSM + attention()(norm()(x_BSM), encoded, None, self.train)
        return x_BSM + MLP(self.config)(norm()(x_BSM), self.train), None


class Stack(nn.Module):
    """The layers, scanned or not."""

    config: Config
    train: bool

    @nn.compact
    def __call__(self, x_BSM: jax.Array, mask: Any = None, encoded: Any = None) -> jax.Array:
        block = nn.remat(Block, prevent_cse=not self.config.scan) if self.config.remat else Block
        if self.config.scan:
            scanned = nn.scan(
                block,
                variable_axes={"params": 0, "cache": 0},
                split_rngs={"params": True, "dropout": True},
                in_axes=nn.broadcast,
                length=self.config.layers,
                metadata_params={nn.PARTITION_NAME: "layers"},
            )
            x_BSM, _ = scanned(self.config, self.train)(x_BSM, mask, encoded)
        else:
            for _ in range(self.config.layers):
                x_BSM, _ = block(self.config, self.train)(x_BSM, mask, encoded)
        return nn.LayerNorm(dtype=self.config.dtype)(x_BSM)


class LanguageModel(nn.Module):
    """A decoder with learned positions and a tied head."""

    config: Config

    @nn.compact
    def __call__(self, tokens_BS: jax.Array, *, train: bool = False) -> jax.Array:
        c = self.config
        embed = nn.Embed(c.vocab, c.features, dtype=c.dtype, embedding_init=placed("vocab", "embed"))
        position = self.param("position", placed("length", "embed"), (c.context, c.features))
        mask = None if c.decode else nn.make_causal_mask(tokens_BS)
        x_BSM = embed(tokens_BS) + position[: tokens_BS.shape[1]].astype(c.dtype)
        return embed.attend(Stack(c, train)(x_BSM, mask)).astype(jnp.float32)


class Translator(nn.Module):
    """An encoder and a decoder with one embedding."""

    config: Config

    @nn.compact
    def __call__(self, source_BS: jax.Array, target_BS: jax.Array, *, train: bool = False) -> jax.Array:
        c = self.config
        embed = nn.Embed(c.vocab, c.features, dtype=c.dtype, embedding_init=placed("vocab", "embed"))
        encoded = Stack(c, train)(embed(source_BS), nn.make_attention_mask(source_BS > 0, source_BS > 0))
        return embed.attend(Stack(c, train)(embed(target_BS), nn.make_causal_mask(target_BS), encoded))


class Recurrent(nn.Module):
    """LSTM layers between an embedding and a head."""

    config: Config

    @nn.compact
    def __call__(self, tokens_BS: jax.Array, *, train: bool = False) -> jax.Array:
        c = self.config
        x_BSM = nn.Embed(c.vocab, c.features, embedding_init=placed("vocab", "embed"))(tokens_BS)
        for _ in range(c.layers):
            cell = nn.OptimizedLSTMCell(c.features, kernel_init=placed("embed", "mlp"))
            x_BSM = nn.Dropout(c.dropout)(nn.RNN(cell)(x_BSM), deterministic=not train)
        return nn.Dense(c.vocab, kernel_init=placed("embed", "vocab"))(x_BSM)


def smoothed_loss(logits: jax.Array, labels_BS: jax.Array) -> jax.Array:
    """Cross-entropy with label smoothing over the tokens that aren't padding."""
    targets = optax.smooth_labels(common_utils.onehot(labels_BS, logits.shape[-1]), 0.1)
    weights = jnp.where(labels_BS > 0, 1.0, 0.0)
    return (optax.softmax_cross_entropy(logits.astype(jnp.float32), targets) * weights).sum() / weights.sum()


def trained(model: nn.Module, num_rows: int, rules: LogicalRules, sizes: Sizes) -> Step:
    """The examples' train step: each row's last array is its inputs and labels."""
    rows = ints(num_rows, model.config.context)
    inputs = (rows, rows) if isinstance(model, Translator) else (rows,)

    def init(key: jax.Array, *inputs: jax.Array) -> train_state.TrainState:
        params = model.init(key, *inputs)["params"]
        return train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-3, b2=0.98))

    def run(state: train_state.TrainState, key: jax.Array, *batch: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            shifted = jnp.pad(batch[-1], ((0, 0), (1, 0)))[:, :-1]
            rngs = {"dropout": jax.random.fold_in(key, state.step)}
            return smoothed_loss(
                state.apply_fn({"params": params}, *batch[:-1], shifted, train=True, rngs=rngs), batch[-1]
            )

        value, gradients = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=gradients), value

    boxed = jax.eval_shape(init, KEY, *inputs)
    state = nn.unbox(boxed)
    weights = renamed(nn.logical_to_mesh(nn.get_partition_spec(boxed), rules), state, sizes)
    return Step(run=run, args=(state, KEY, *inputs), specs=(weights, None, *(batch_specs(i, sizes) for i in inputs)))


def decoded(model: nn.Module, num_rows: int, rules: LogicalRules, sizes: Sizes) -> Step:
    """A token of each row with a cache of all positions."""
    config = model.config
    variables = jax.eval_shape(model.init, KEY, ints(num_rows, config.context))
    params = nn.unbox(variables["params"])

    def run(cache: Any, params: Any, tokens_BS: jax.Array) -> Any:
        logits, updated = model.apply({"params": params, "cache": cache}, tokens_BS, mutable=["cache"])
        return updated["cache"], jnp.argmax(logits[:, -1], axis=-1)

    weights = renamed(nn.logical_to_mesh(nn.get_partition_spec(variables["params"]), rules), params, sizes)
    cache = variables["cache"]
    dims = (None, ("data", "fsdp"), None, "model") if config.scan else (("data", "fsdp"), None, "model")
    tokens = ints(num_rows, 1)
    return Step(
        run=run,
        args=(cache, params, tokens),
        specs=(batch_specs(cache, sizes, P(*dims)), weights, batch_specs(tokens, sizes)),
    )


LARGE = Config(features=2048, mlp=8192, layers=16, context=1024)

PROGRAMS: dict[str, MakeProgram] = {
    "linen decoder": partial(trained, LanguageModel(Config()), 32, MEGATRON),
    "linen decoder, float32, data": partial(trained, LanguageModel(Config(layers=6, dtype=jnp.float32)), 16, DATA),
    "linen decoder, scanned, remat": partial(
        trained, LanguageModel(replace(LARGE, scan=True, remat=True)), 16, MEGATRON
    ),
    "linen decoder, scanned, fsdp": partial(
        trained, LanguageModel(Config(scan=True, remat=True, dropout=0.0)), 32, FSDP
    ),
    "linen decoder, cached": partial(decoded, LanguageModel(replace(LARGE, decode=True)), 64, MEGATRON),
    "linen decoder, scanned, cached": partial(
        decoded, LanguageModel(replace(LARGE, decode=True, scan=True)), 64, MEGATRON
    ),
    "linen translator, remat": partial(trained, Translator(Config(layers=6, context=256, remat=True)), 64, MEGATRON),
    "linen lstm": partial(trained, Recurrent(Config(features=2048, layers=2, context=128)), 128, MEGATRON),
}
