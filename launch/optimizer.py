"""The optimizer of every model: AdamW with its learning-rate schedule, gradient clipping, weight decay and ZeRO."""

import re
from typing import Any

import jax
import optax
from flax import nnx

from sharding import P, zero
from sharding.annotations.layout import Layout

from .config.optimizer_config import Optimization


def learning_rate(optimization: Optimization, steps: int) -> optax.Schedule:
    """The learning-rate schedule: linear warm-up, then cosine decay to a tenth."""
    warmup = min(optimization.warmup, steps // 2)
    return optax.warmup_cosine_decay_schedule(
        init_value=optimization.lr / (warmup + 1),
        peak_value=optimization.lr,
        warmup_steps=warmup,
        decay_steps=steps,
        end_value=optimization.lr / 10,
    )


def optimizer(optimization: Optimization, schedule: optax.Schedule) -> optax.GradientTransformation:
    """AdamW on gradients clipped by their global norm; norms and biases do not decay."""
    return optax.chain(
        optax.clip_by_global_norm(optimization.clip),
        optax.adamw(schedule, b2=0.95, weight_decay=optimization.weight_decay, mask=_decays),
    )


def with_zero(
    transform: optax.GradientTransformation, optimization: Optimization, params: Any, rules: Layout
) -> optax.GradientTransformation:
    """The optimizer with ZeRO over the axis `data`, if requested and the mesh in context has that axis."""
    if not optimization.zero or "data" not in jax.sharding.get_abstract_mesh().axis_names:
        return transform
    return zero.shard(
        transform,
        stage=optimization.zero,
        like=layout_specs(params, rules),
        offload=optimization.offload,
        delay_after=optimization.delay_after,
    )


def layout_specs(params: Any, rules: Layout) -> Any:
    """The parameters' specs by a layout."""
    found = rules(params)
    return jax.tree.map(lambda _, spec: P() if spec is None else spec, params, found, is_leaf=lambda x: x is None)


def _decays(params: nnx.State) -> nnx.State:
    # By name: a stacked norm has two dims too.
    kept = re.compile(r"norm\d*\b|\bbias")
    return jax.tree.map_with_path(lambda path, _: not kept.search(jax.tree_util.keystr(path)), params)
