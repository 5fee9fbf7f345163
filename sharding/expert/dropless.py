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
    groups, length, _ = x_GSM.shape
    # Choices not dispatched get an index after all experts, whose rows no device computes.
    chosen_GSK = jnp.where(routing.wanted_GSK, routing.experts_GSK, experts.up.shape[0])
    weights_GSK = jnp.where(routing.wanted_GSK, routing.weights_GSK, 0)
    tokens = x_GSM, chosen_GSK, weights_GSK
    matmul = functools.partial(kernels.grouped_matmul, implementation=experts.implementation)
    local = functools.partial(_local, activation=experts.activation, matmul=matmul)
    if axes is None:
        return local(*tokens, experts.up, experts.down)
    rows = axes.token_spec(groups, length)
    if rows is None:  # sequences of which a device has no whole number: sharded as one row of tokens
        rows = P(None, axes.token_axes(groups * length) or None)
        tokens = _one_row(x_GSM), _one_row(chosen_GSK), _one_row(weights_GSK)
    if axes.expert_axis_size > 1 and axes.expert not in jax.tree.leaves(tuple(rows)):
        raise ShardingError(
            f"expert.MoE(capacity_factor=None) for {groups} x {length} tokens",
            found=f"axes {', '.join((*axes.batch, str(axes.expert)))} of sizes {dict(axes.sizes)}",
            required="axis sizes that divide the tokens",
            fix="capacity_factor=math.inf",
        )
    up, down = P(axes.expert, None, axes.hidden), P(axes.expert, axes.hidden)
    local = functools.partial(local, axes=axes, ragged=platform() in token_exchange.RAGGED)
    run = jax.shard_map(local, in_specs=(rows, rows, rows, up, down), out_specs=rows)
    return run(*tokens, experts.up, experts.down).reshape(x_GSM.shape)


def _one_row(array_GS_: jax.Array) -> jax.Array:
    return array_GS_.reshape(1, -1, array_GS_.shape[-1])


def _local(
    x_GSM: jax.Array,
    chosen_GSK: jax.Array,
    weights_GSK: jax.Array,
    up_EMF: jax.Array,
    down_EFM: jax.Array,
    *,
    activation: Callable[[jax.Array], jax.Array],
    matmul: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    axes: MeshAxes | None = None,
    ragged: bool = False,
) -> jax.Array:
    """Output [G, S, M] for the local tokens, N in all; R = N K rows, one per choice."""
    x_NM, chosen_NK, weights_NK = (array.reshape(-1, array.shape[-1]) for array in (x_GSM, chosen_GSK, weights_GSK))
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
    y_NM = y_NM if axes is None or axes.hidden is None else jax.lax.psum(y_NM, axes.hidden)
    return y_NM.reshape(x_GSM.shape)
