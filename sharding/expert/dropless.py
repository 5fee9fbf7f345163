"""Dropless experts (as MegaBlocks): rows sorted by expert, and grouped matmuls over all experts.

Each device runs this on its own tokens in a `shard_map`, since the number of rows per expert is known only at run time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from .. import kernels
from ..errors import ShardingError
from ..mesh import platform
from . import token_exchange
from .expert_axes import MeshAxes
from .ffn import Experts
from .routing import Routing


def run(x_GSM: jax.Array, routing: Routing, experts: Experts, *, axes: MeshAxes | None) -> jax.Array:
    """Output of the experts [G, S, M]; no choice is dropped.

    Raises:
        ShardingError: the expert axis does not divide the tokens.

    References:
        Gale et al., MegaBlocks, MLSys 2023 (2211.15841), section 3.1, for dropless expert computation.
    """
    groups, length, features = x_GSM.shape
    num_experts, tokens = experts.up.shape[0], groups * length
    x_NM = x_GSM.reshape(tokens, features)
    # Choices not dispatched get an index after all experts, whose rows no device computes.
    chosen_NK = jnp.where(routing.wanted_GSK, routing.experts_GSK, num_experts).reshape(tokens, -1)
    weights_NK = jnp.where(routing.wanted_GSK, routing.weights_GSK, 0).reshape(tokens, -1)
    matmul = functools.partial(kernels.grouped_matmul, implementation=experts.implementation)
    local = functools.partial(_local, activation=experts.activation, matmul=matmul)
    if axes is None:
        return local(x_NM, chosen_NK, weights_NK, experts.up, experts.down).reshape(x_GSM.shape)
    axes_of_tokens = axes.token_axes(tokens)
    if axes.expert_axis_size > 1 and axes.expert not in axes_of_tokens:
        raise ShardingError(
            f"expert.MoE(capacity_factor=None) for {groups} x {length} tokens",
            found=f"axes {', '.join((*axes.batch, str(axes.expert)))} of sizes {dict(axes.sizes)}",
            required="axis sizes that divide the tokens",
            fix="capacity_factor=math.inf",
        )
    up, down = P(axes.expert, None, axes.hidden), P(axes.expert, axes.hidden)
    rows = P(axes_of_tokens or None)
    local = functools.partial(local, axes=axes, ragged=platform() in token_exchange.RAGGED)
    run = jax.shard_map(local, in_specs=(rows, rows, rows, up, down), out_specs=rows)
    return run(x_NM, chosen_NK, weights_NK, experts.up, experts.down).reshape(x_GSM.shape)


def _local(
    x_NM: jax.Array,
    chosen_NK: jax.Array,
    weights_NK: jax.Array,
    up_EMF: jax.Array,
    down_EFM: jax.Array,
    *,
    activation: Callable[[jax.Array], jax.Array],
    matmul: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    axes: MeshAxes | None = None,
    ragged: bool = False,
) -> jax.Array:
    """Output [N, M] for the local tokens; R = N K rows, one per choice."""
    tokens, top_k = chosen_NK.shape
    parts = 1 if axes is None else axes.expert_axis_size
    num_experts = parts * up_EMF.shape[0]
    order_R = jnp.argsort(chosen_NK.reshape(-1), stable=True)
    rows_RM = x_NM[order_R // top_k]
    count_E = jnp.sum(chosen_NK.reshape(-1, 1) == jnp.arange(num_experts)[None, :], axis=0, dtype=jnp.int32)

    def ffn(rows_RM: jax.Array, count_E: jax.Array) -> jax.Array:
        return matmul(
            activation(matmul(rows_RM, up_EMF, count_E)), down_EFM, count_E
        )  # 0 beyond the last expert's rows

    if axes is None or axes.expert is None or parts == 1:
        out_RM = ffn(rows_RM, count_E)
    else:
        out_RM = token_exchange.run_on_expert_devices(
            rows_RM, count_E, ffn, axis=axes.expert, parts=parts, ragged=ragged
        )
    out_NKM = out_RM[jnp.argsort(order_R)].reshape(tokens, top_k, -1)
    y_NM = jnp.einsum("NKM,NK->NM", out_NKM, weights_NK.astype(out_NKM.dtype))
    # The sum over hidden features, delayed to where the array is smallest.
    return y_NM if axes is None or axes.hidden is None else jax.lax.psum(y_NM, axes.hidden)
