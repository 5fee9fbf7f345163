"""Penzai: Llama-like and Gemma-like transformers over named axes, sharded by the names, stacked or checkpointed."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType
from penzai import pz
from penzai.models.transformer import model_parts
from penzai.models.transformer.variants.llamalike_common import (
    AttentionTypeGlobalCausal,
    AttentionTypeSlidingWindowCausal,
    LlamalikeTransformerConfig,
    build_llamalike_transformer,
)
from penzai.toolshed.gradient_checkpointing import Checkpointed
from penzai.toolshed.sharding_util import name_to_name_sharding
from support.train_steps.step import Sizes, Step

from . import MakeProgram
from .common import KEY, batch_specs, ints, renamed, training

PACKAGE = "penzai"

AxisNames = Mapping[str, str]
"""Name of a parameter's axis -> mesh axis."""
MEGATRON: AxisNames = {
    "vocabulary": "model",
    "head_groups": "model",
    "heads": "model",
    "neurons": "model",
    "embedding": "fsdp",
}
FSDP: AxisNames = {"embedding": "fsdp"}

Config = LlamalikeTransformerConfig


def abstract(config: Config, remat: bool) -> tuple[Any, Any]:
    """The model without its parameters, and the parameters."""

    def init(key: jax.Array) -> tuple[Any, Any]:
        model = build_llamalike_transformer(config, init_base_rng=key)
        if remat:
            model = pz.select(model).at_instances_of(model_parts.TransformerBlock).apply(Checkpointed)
        return pz.unbind_params(model, freeze=True)

    return jax.eval_shape(init, KEY)


def placed(params: Any, names: AxisNames, sizes: Sizes) -> Any:
    """Specs by the names of the axes of each parameter."""
    ours = {"fsdp": "fsdp" if "fsdp" in sizes else "data"}
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    shardings = name_to_name_sharding(params, mesh, {name: ours.get(axis, axis) for name, axis in names.items()})
    return renamed(jax.tree.map(lambda s: s.spec, shardings), params, sizes)


def loss(params: Any, bare: Any, tokens_BS: jax.Array) -> jax.Array:
    """The mean cross-entropy of each next token."""
    model = pz.bind_variables(bare, params)
    logits = model(pz.nx.wrap(tokens_BS, "batch", "seq")).unwrap("batch", "seq", "vocabulary")
    logits = logits[:, :-1].astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens_BS[:, 1:]).mean()


def trained(config: Config, rows: int, names: AxisNames, sizes: Sizes, *, context: int, remat: bool = False) -> Step:
    """A train step of the parameters."""
    bare, params = abstract(config, remat)
    return training(loss, params, (bare, ints(rows, context)), sizes, weights=placed(params, names, sizes))


def scored(config: Config, rows: int, names: AxisNames, sizes: Sizes, *, context: int) -> Step:
    """The loss without gradients."""
    bare, params = abstract(config, False)
    tokens = ints(rows, context)

    def run(_: None, params: Any, bare: Any, tokens_BS: jax.Array) -> Any:
        return None, loss(params, bare, tokens_BS)

    specs = None, placed(params, names, sizes), None, batch_specs(tokens, sizes)
    return Step(run=run, args=(None, params, bare, tokens), specs=specs)


LLAMA = Config(
    num_kv_heads=8,
    query_head_multiplier=4,
    embedding_dim=2048,
    projection_dim=64,
    mlp_hidden_dim=8192,
    num_decoder_blocks=12,
    vocab_size=32000,
    mlp_variant="swiglu",
    tie_embedder_and_logits=False,
    parameter_dtype=jnp.bfloat16,
    activation_dtype=jnp.bfloat16,
    use_layer_stack=True,
)
GEMMA_2 = Config(
    num_kv_heads=8,
    query_head_multiplier=1,
    embedding_dim=1152,
    projection_dim=256,
    mlp_hidden_dim=6912,
    num_decoder_blocks=10,
    vocab_size=65536,
    mlp_variant="geglu_approx",
    tie_embedder_and_logits=True,
    attention_type=(AttentionTypeSlidingWindowCausal(256), AttentionTypeGlobalCausal()),
    use_post_attn_norm=True,
    use_post_ffw_norm=True,
    final_logit_softcap=30.0,
    attn_logits_soft_cap=50.0,
)

PROGRAMS: dict[str, MakeProgram] = {
    "llama, stacked": partial(trained, LLAMA, 16, MEGATRON, context=512),
    "llama, stacked, fsdp": partial(trained, LLAMA, 8, FSDP, context=256),
    "gemma 2, checkpointed": partial(trained, GEMMA_2, 16, MEGATRON, context=512, remat=True),
    "gemma 2, data": partial(trained, GEMMA_2, 8, {}, context=256),
    "llama, stacked, evaluation": partial(scored, LLAMA, 32, MEGATRON, context=1024),
}
