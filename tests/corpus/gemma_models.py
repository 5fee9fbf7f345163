"""Gemma: DeepMind's Gemma 2, 3 and 3n in linen, fine-tuned whole, with LoRA or quantization-aware, and decoding."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from gemma import gm, peft
from support.train_steps.step import Sizes, Step

from sharding import P

from . import MakeProgram
from .common import KEY, Rules, batch_specs, ints, largest_dim, specs, training

PACKAGE = "gemma"

MEGATRON: Rules = (
    ("*/input_embedding", P("model", "fsdp")),
    ("*/q_einsum/w", P("model", "fsdp", None)),
    ("*/kv_einsum/w", P(None, "model", "fsdp", None)),
    ("*/qkv_einsum/w", P(None, "model", "fsdp", None)),
    ("*/attn_vec_einsum/w", P("model", None, "fsdp")),
    ("*/mlp/gating_einsum", P(None, "model", "fsdp")),
    ("*/mlp/linear", P("model", "fsdp")),
)
DATA: Rules = (("*", P()),)


def loss(model: nn.Module, params: Any, tokens_BS: jax.Array, mask_BS: jax.Array) -> jax.Array:
    """The mean cross-entropy of each next token of the answers."""
    logits = model.apply({"params": params}, tokens_BS).logits[:, :-1].astype(jnp.float32)
    each = optax.softmax_cross_entropy_with_integer_labels(logits, tokens_BS[:, 1:])
    return jnp.sum(each * mask_BS[:, 1:]) / jnp.sum(mask_BS[:, 1:])


def parameters(model: nn.Module) -> Any:
    """The shapes of the parameters."""
    return jax.eval_shape(model.init, KEY, ints(1, 16))["params"]


def tuned(model: nn.Module, rows: int, context: int, rules: Rules | None, sizes: Sizes, **options: Any) -> Step:
    """A train step of all parameters; without rules, FSDP."""
    params = parameters(model)
    weights = largest_dim(params, sizes) if rules is None else specs(params, rules, sizes)
    batch = ints(rows, context), ints(rows, context)
    return training(partial(loss, model), params, batch, sizes, weights=weights, **options)


def adapted(model: nn.Module, rows: int, context: int, rules: Rules, sizes: Sizes) -> Step:
    """A train step of the LoRA parameters, beside the frozen ones."""

    def labels(params: Any) -> Any:
        base, lora = peft.split_params(params)
        return peft.merge_params(jax.tree.map(lambda _: "base", base), jax.tree.map(lambda _: "lora", lora))

    optimizer = optax.partition({"lora": optax.adafactor(1e-3), "base": optax.set_to_zero()}, labels)
    return tuned(gm.nn.LoRA(rank=8, model=model), rows, context, rules, sizes, optimizer=optimizer)


def decoded(model: nn.Module, rows: int, slots: int, rules: Rules, sizes: Sizes) -> Step:
    """A token of each row, with a cache."""
    params = parameters(model)
    make = partial(model.init_cache, batch_size=rows, dtype=jnp.bfloat16, cache_length=slots)
    cache = jax.eval_shape(make)

    def run(cache: Any, params: Any, tokens_BS: jax.Array, positions_BS: jax.Array, mask: jax.Array) -> Any:
        out = model.apply({"params": params}, tokens_BS, cache=cache, positions=positions_BS, attention_mask=mask)
        return out.cache, jnp.argmax(out.logits[:, -1], axis=-1)

    batch = ints(rows, 1), ints(rows, 1), jax.ShapeDtypeStruct((rows, 1, slots), jnp.bool_)
    heads = batch_specs(cache, sizes, P(("data", "fsdp"), None, "model"))
    rest = (batch_specs(b, sizes) for b in batch)
    return Step(run=run, args=(cache, params, *batch), specs=(heads, specs(params, rules, sizes), *rest))


def scored(model: nn.Module, rows: int, context: int, rules: Rules, sizes: Sizes) -> Step:
    """The loss without gradients."""
    params, batch = parameters(model), (ints(rows, context), ints(rows, context))

    def run(_: None, params: Any, *batch: jax.Array) -> Any:
        return None, loss(model, params, *batch)

    rest = (batch_specs(b, sizes) for b in batch)
    return Step(run=run, args=(None, params, *batch), specs=(None, specs(params, rules, sizes), *rest))


QAT = gm.nn.QuantizationAwareWrapper(method=peft.QuantizationMethod.INT4, model=gm.nn.Gemma3_270M())

PROGRAMS: dict[str, MakeProgram] = {
    "gemma 3 270m, float32, data": partial(tuned, gm.nn.Gemma3_270M(dtype=jnp.float32), 8, 128, DATA),
    "gemma 3 1b": partial(tuned, gm.nn.Gemma3_1B(), 16, 256, MEGATRON),
    "gemma 3 1b, fsdp": partial(tuned, gm.nn.Gemma3_1B(), 8, 128, None),
    "gemma 3 270m, int4 aware": partial(tuned, QAT, 16, 256, MEGATRON),
    "gemma 2 2b, lora": partial(adapted, gm.nn.Gemma2_2B(), 8, 256, MEGATRON),
    "gemma 2 2b, decode": partial(decoded, gm.nn.Gemma2_2B(), 32, 4096, MEGATRON),
    "gemma 3n e2b, evaluation": partial(scored, gm.nn.Gemma3n_E2B(), 8, 256, MEGATRON),
}
