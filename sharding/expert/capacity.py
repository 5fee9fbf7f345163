"""Dispatch and combine with expert capacity: tokens beyond it are dropped (GShard, Switch).

Tokens move to the slots of experts and back by two einsums, each followed or preceded by an annotation that reshards
from groups to experts: one all-to-all each, of a size that does not depend on the routing.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ..annotations.annotate import annotate
from .expert_axes import MeshAxes
from .ffn import Experts
from .routing import Routing

U = P.UNCONSTRAINED


def expert_capacity(factor: float, *, tokens: int, top_k: int, num_experts: int) -> int:
    """Expert capacity C = ceil(factor * K S / E), at least 1 and at most S: a token takes one slot of an expert."""
    balanced = factor * top_k * tokens / num_experts
    return tokens if balanced >= tokens else max(1, math.ceil(balanced))


def assign_slots(routing: Routing, num_experts: int) -> jax.Array:
    """Slot of each choice in its expert, [G, S, K] int32, which may exceed the capacity; -1 if not dispatched.

    All first choices come first, in token order, then all second choices, and so on.
    """
    chosen_GSKE = jax.nn.one_hot(routing.experts_GSK, num_experts, dtype=jnp.int32)
    chosen_GSKE = chosen_GSKE * routing.wanted_GSK[..., None]
    chosen_GKSE = jnp.swapaxes(chosen_GSKE, 1, 2)
    so_far_GKSE = jnp.cumsum(chosen_GKSE, axis=2)
    all_GKE = so_far_GKSE[:, :, -1]
    before_GKE = jnp.cumsum(all_GKE, axis=1) - all_GKE
    slot_GKS = jnp.sum(chosen_GKSE * (so_far_GKSE + before_GKE[:, :, None]), axis=-1) - 1
    return jnp.swapaxes(slot_GKS, 1, 2)


def combine(routing: Routing, slot_GSK: jax.Array, num_experts: int, capacity: int) -> jax.Array:
    """Combine weights [G, S, E, C]: the weight of each slot's output for each token, 0 for slots of other tokens."""
    expert_GSKE = jax.nn.one_hot(routing.experts_GSK, num_experts, dtype=jnp.float32)
    slot_GSKC = jax.nn.one_hot(slot_GSK, capacity, dtype=jnp.float32)  # zeros for a slot outside the capacity
    return jnp.einsum("GSK,GSKE,GSKC->GSEC", routing.weights_GSK, expert_GSKE, slot_GSKC)


def dispatch(routing: Routing, slot_GSK: jax.Array, num_experts: int, capacity: int) -> jax.Array:
    """Dispatch mask [G, S, E, C], float32: whether a token occupies a slot."""
    expert_GSKE = jax.nn.one_hot(routing.experts_GSK, num_experts, dtype=jnp.float32)
    slot_GSKC = jax.nn.one_hot(slot_GSK, capacity, dtype=jnp.float32)
    return jnp.einsum("GSKE,GSKC->GSEC", expert_GSKE, slot_GSKC)


def run(
    x_GSM: jax.Array, routing: Routing, experts: Experts, *, capacity: int, axes: MeshAxes | None
) -> tuple[jax.Array, jax.Array]:
    """Output of the experts [G, S, M], and the number of dropped choices.

    References:
        Lepikhin et al., GShard, ICLR 2021 (2006.16668), sections 2.2, 3.1 and algorithm 2.
    """
    num_experts = experts.up.shape[0]
    routing = routing._replace(
        experts_GSK=_replicate_within_groups(routing.experts_GSK, axes),
        weights_GSK=_replicate_within_groups(routing.weights_GSK, axes),
        wanted_GSK=_replicate_within_groups(routing.wanted_GSK, axes),
    )
    slot_GSK = assign_slots(routing, num_experts)
    combine_GSEC = _replicate_within_groups(combine(routing, slot_GSK, num_experts, capacity).astype(x_GSM.dtype), axes)
    dispatch_GSEC = _replicate_within_groups(
        dispatch(routing, slot_GSK, num_experts, capacity).astype(x_GSM.dtype), axes
    )
    dispatched_EGCM = jnp.einsum("GSEC,GSM->EGCM", dispatch_GSEC, x_GSM)
    dispatched_EGCM = _shard_by_experts(_shard_by_groups(dispatched_EGCM, axes), axes)
    hidden_EGCF = experts.activation(jnp.einsum("EGCM,EMF->EGCF", dispatched_EGCM, experts.up))
    out_EGCM = jnp.einsum("EGCF,EFM->EGCM", hidden_EGCF, experts.down)
    out_EGCM = _shard_by_groups(_shard_by_experts(out_EGCM, axes), axes)
    y_GSM = jnp.einsum("EGCM,GSEC->GSM", out_EGCM, combine_GSEC)
    return y_GSM, jnp.sum(slot_GSK >= capacity, dtype=jnp.int32)


def _replicate_within_groups(x_GS___: jax.Array, axes: MeshAxes | None) -> jax.Array:
    """[G, S, K] or [G, S, E, C] with S replicated if an axis shards the length.

    The slot of a token depends on earlier tokens of its group, and routing decisions are small to communicate.
    """
    if axes is None or axes.length is None:
        return x_GS___
    rest = (U,) if x_GS___.ndim == 3 else (None, axes.slot_axis(x_GS___.shape[3]) or U)
    return annotate(x_GS___, P(axes.group_axes(len(x_GS___)) or None, None, *rest))


def _shard_by_groups(x_EGCM: jax.Array, axes: MeshAxes | None) -> jax.Array:
    """Slots of all experts, sharded over groups."""
    if axes is None:
        return x_EGCM
    groups, slots = axes.group_axes(x_EGCM.shape[1]), _slot_axis(x_EGCM, axes)
    return annotate(x_EGCM, P(None, groups or None, slots, U))


def _shard_by_experts(x_EGCM: jax.Array, axes: MeshAxes | None) -> jax.Array:
    """Slots sharded over experts, with groups gathered along the expert axis."""
    if axes is None:
        return x_EGCM
    groups = tuple(name for name in axes.group_axes(x_EGCM.shape[1]) if name != axes.expert)
    return annotate(x_EGCM, P(axes.expert, groups or None, _slot_axis(x_EGCM, axes), U))


def _slot_axis(x_EGCM: jax.Array, axes: MeshAxes) -> Any:
    """The length axis also shards slots if it divides them, so that its devices do no duplicate work."""
    return axes.slot_axis(x_EGCM.shape[2]) or U
