"""Experts that take whatever comes: rows sorted by expert, and one product of all their matrices.

Each device runs this on its own tokens (`shard_map`): how many rows go where is known only when they do.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ..errors import ShardingError
from . import exchange
from .axes import Axes, platform
from .ffn import Experts
from .routing import Routing


def run(x_GSM: jax.Array, routing: Routing, experts: Experts, *, axes: Axes | None) -> jax.Array:
    """What the experts make of the tokens, [G, S, M]; every wanted choice counts.

    Raises:
        ShardingError: the axis that splits the experts doesn't divide the tokens.

    References:
        Gale et al., MegaBlocks, MLSys 2023 (2211.15841), section 3.1, for products without places.
    """
    groups, length, features = x_GSM.shape
    num_experts, tokens = experts.up.shape[0], groups * length
    x_NM = x_GSM.reshape(tokens, features)
    # Not wanted: a number behind all experts, whose rows nobody computes.
    chosen_NK = jnp.where(routing.wanted_GSK, routing.experts_GSK, num_experts).reshape(tokens, -1)
    weights_NK = jnp.where(routing.wanted_GSK, routing.weights_GSK, 0).reshape(tokens, -1)
    if axes is None:
        return _computed(x_NM, chosen_NK, weights_NK, experts.up, experts.down, experts.activation).reshape(x_GSM.shape)
    split = axes.of_tokens(tokens)
    if axes.num_expert_parts > 1 and axes.expert not in split:
        raise ShardingError(
            f"expert.MoE without places for {groups} x {length} tokens",
            there=f"axes {', '.join((*axes.batch, str(axes.expert)))} of sizes {dict(axes.sizes)}",
            must="the axes divide the tokens",
            fix="capacity_factor=math.inf",
        )
    up, down = P(axes.expert, None, axes.hidden), P(axes.expert, axes.hidden)
    rows = P(split or None)
    local = functools.partial(_computed, activation=experts.activation, axes=axes, ragged=platform() in exchange.RAGGED)
    run = jax.shard_map(local, in_specs=(rows, rows, rows, up, down), out_specs=rows)
    return run(x_NM, chosen_NK, weights_NK, experts.up, experts.down).reshape(x_GSM.shape)


def _computed(
    x_NM: jax.Array,
    chosen_NK: jax.Array,
    weights_NK: jax.Array,
    up_EMF: jax.Array,
    down_EFM: jax.Array,
    activation: Any,
    axes: Axes | None = None,
    ragged: bool = False,
) -> jax.Array:
    """Of a device's tokens, [N, M]; R = N K rows, one for each choice."""
    tokens, top_k = chosen_NK.shape
    parts = 1 if axes is None else axes.num_expert_parts
    num_experts = parts * up_EMF.shape[0]
    order_R = jnp.argsort(chosen_NK.reshape(-1), stable=True)
    rows_RM = x_NM[order_R // top_k]
    count_E = jnp.sum(chosen_NK.reshape(-1, 1) == jnp.arange(num_experts)[None, :], axis=0, dtype=jnp.int32)

    def ffn(rows_RM: jax.Array, count_E: jax.Array) -> jax.Array:
        hidden_RF = activation(jax.lax.ragged_dot(rows_RM, up_EMF, count_E))
        out_RM = jax.lax.ragged_dot(hidden_RF, down_EFM, count_E)
        # What a grouped product leaves behind its last group is not defined.
        return jnp.where((jnp.arange(len(out_RM)) < jnp.sum(count_E))[:, None], out_RM, 0)

    if axes is None or axes.expert is None or parts == 1:
        out_RM = ffn(rows_RM, count_E)
    else:
        out_RM = exchange.at_experts(rows_RM, count_E, ffn, axis=axes.expert, parts=parts, ragged=ragged)
    out_NKM = out_RM[jnp.argsort(order_R)].reshape(tokens, top_k, -1)
    y_NM = jnp.einsum("NKM,NK->NM", out_NKM, weights_NK.astype(out_NKM.dtype))
    # A sum of hidden features, put off to where there are the fewest numbers.
    return y_NM if axes is None or axes.hidden is None else jax.lax.psum(y_NM, axes.hidden)
