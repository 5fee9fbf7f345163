"""Experts with a place for so many tokens of each group: what finds no place is dropped.

Tokens go to their places and back by two products, between which an annotation changes from tokens to experts the dim
that the axis splits: an all-to-all each, of the same size whatever the tokens choose.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ..annotation import annotate
from .axes import Axes
from .ffn import Experts
from .routing import Routing

U = P.UNCONSTRAINED


def num_places(factor: float, *, tokens: int, top_k: int, num_experts: int) -> int:
    """C = factor * K S / E rounded up, at least 1 and at most S: a token takes one place of an expert."""
    wanted = factor * top_k * tokens / num_experts
    return tokens if wanted >= tokens else max(1, math.ceil(wanted))


def places(routing: Routing, num_experts: int) -> jax.Array:
    """Which place of its expert each choice gets, [G, S, K] int32; -1 for a choice that is not wanted.

    First come all first choices, in the order of the tokens, then all second ones, and so on.
    """
    chosen_GSKE = jax.nn.one_hot(routing.experts_GSK, num_experts, dtype=jnp.int32)
    chosen_GSKE = chosen_GSKE * routing.wanted_GSK[..., None]
    chosen_GKSE = jnp.swapaxes(chosen_GSKE, 1, 2)
    so_far_GKSE = jnp.cumsum(chosen_GKSE, axis=2)
    all_GKE = so_far_GKSE[:, :, -1]
    before_GKE = jnp.cumsum(all_GKE, axis=1) - all_GKE
    place_GKS = jnp.sum(chosen_GKSE * (so_far_GKSE + before_GKE[:, :, None]), axis=-1) - 1
    return jnp.swapaxes(place_GKS, 1, 2)


def combine(routing: Routing, place_GSK: jax.Array, num_experts: int, capacity: int) -> jax.Array:
    """What each place's output counts for each token, [G, S, E, C]; 0 where the token isn't."""
    expert_GSKE = jax.nn.one_hot(routing.experts_GSK, num_experts, dtype=jnp.float32)
    place_GSKC = jax.nn.one_hot(place_GSK, capacity, dtype=jnp.float32)  # of one outside of them nothing
    return jnp.einsum("GSK,GSKE,GSKC->GSEC", routing.weights_GSK, expert_GSKE, place_GSKC)


def dispatch(routing: Routing, place_GSK: jax.Array, num_experts: int, capacity: int) -> jax.Array:
    """Whether a token is at a place, [G, S, E, C] float32."""
    expert_GSKE = jax.nn.one_hot(routing.experts_GSK, num_experts, dtype=jnp.float32)
    place_GSKC = jax.nn.one_hot(place_GSK, capacity, dtype=jnp.float32)
    return jnp.einsum("GSKE,GSKC->GSEC", expert_GSKE, place_GSKC)


def run(
    x_GSM: jax.Array, routing: Routing, experts: Experts, *, capacity: int, axes: Axes | None
) -> tuple[jax.Array, jax.Array]:
    """What the experts make of the tokens, [G, S, M], and how many choices were dropped.

    References:
        Lepikhin et al., GShard, ICLR 2021 (2006.16668), sections 2.2, 3.1 and algorithm 2.
    """
    num_experts = experts.up.shape[0]
    routing = routing._replace(
        experts_GSK=_whole_groups(routing.experts_GSK, axes),
        weights_GSK=_whole_groups(routing.weights_GSK, axes),
        wanted_GSK=_whole_groups(routing.wanted_GSK, axes),
    )
    place_GSK = places(routing, num_experts)
    combine_GSEC = _whole_groups(combine(routing, place_GSK, num_experts, capacity).astype(x_GSM.dtype), axes)
    dispatch_GSEC = _whole_groups(dispatch(routing, place_GSK, num_experts, capacity).astype(x_GSM.dtype), axes)
    sent_EGCM = jnp.einsum("GSEC,GSM->EGCM", dispatch_GSEC, x_GSM)
    sent_EGCM = _by_experts(_by_groups(sent_EGCM, axes), axes)
    hidden_EGCF = experts.activation(jnp.einsum("EGCM,EMF->EGCF", sent_EGCM, experts.up))
    back_EGCM = jnp.einsum("EGCF,EFM->EGCM", hidden_EGCF, experts.down)
    back_EGCM = _by_groups(_by_experts(back_EGCM, axes), axes)
    y_GSM = jnp.einsum("EGCM,GSEC->GSM", back_EGCM, combine_GSEC)
    return y_GSM, jnp.sum(place_GSK >= capacity, dtype=jnp.int32)


def _whole_groups(x_GS___: jax.Array, axes: Axes | None) -> jax.Array:
    """Each device knows of all tokens of its groups what there is to know, [G, S, K] or [G, S, E, C].

    Where an axis splits their length: the place of a token depends on those before it, and what was chosen for all is
    little to send.
    """
    if axes is None or axes.length is None:
        return x_GS___
    rest = (U,) if x_GS___.ndim == 3 else (None, axes.of_places(x_GS___.shape[3]) or U)
    return annotate(x_GS___, P(axes.of_groups(len(x_GS___)) or None, None, *rest))


def _by_groups(x_EGCM: jax.Array, axes: Axes | None) -> jax.Array:
    """Each device has places of its groups, at all experts."""
    if axes is None:
        return x_EGCM
    groups, places = axes.of_groups(x_EGCM.shape[1]), _split_places(x_EGCM, axes)
    return annotate(x_EGCM, P(None, groups or None, places, U))


def _by_experts(x_EGCM: jax.Array, axes: Axes | None) -> jax.Array:
    """Each device has places at its experts, of all groups that the axis splits."""
    if axes is None:
        return x_EGCM
    groups = tuple(name for name in axes.of_groups(x_EGCM.shape[1]) if name != axes.expert)
    return annotate(x_EGCM, P(axes.expert, groups or None, _split_places(x_EGCM, axes), U))


def _split_places(x_EGCM: jax.Array, axes: Axes) -> Any:
    """Devices that share the tokens of a group share its places, so that none computes what another does."""
    return axes.of_places(x_EGCM.shape[2]) or U
