"""A layer of experts, each on a device of its own axis, of which a token visits a few."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from ..annotation import annotate
from ..errors import ShardingError, raise_together
from . import capacity, dropless
from .axes import Axes, of_mesh
from .balance import Balance
from .ffn import Experts
from .gshard import GShard
from .noisy_top_k import NoisyTopK
from .routing import MakesRouter, Routing
from .switch import Switch

RouterName: TypeAlias = Literal["noisy_top_k", "gshard", "switch"]

ROUTERS: Mapping[str, MakesRouter] = {"noisy_top_k": NoisyTopK, "gshard": GShard, "switch": Switch}

U = P.UNCONSTRAINED


class MoE(nnx.Module):
    """x_BSM -> y_BSM and how evenly the experts were used; each token is the weighted sum of what its experts make.

    Its parameters are ``up`` [E, M, F] and ``down`` [E, F, M], and those of ``router``. On a mesh the experts are split
    over ``axis``, and so are the tokens, behind ``batch_axes``: the batch comes split over (data, fsdp, expert), in
    this order, and the length of sequences over ``length_axis``. Numbers don't depend on the mesh.

    Args:
        features: M.
        hidden: F, of each expert.
        num_experts: E, a multiple of the axis' size.
        top_k: experts of each token.
        axis: that splits the experts; None keeps all of them on every device.
        rngs: its `params` stream gives the initial values.
        router: a name, or what makes one, such as ``functools.partial(expert.GShard, loss_weight=0.1)``. Default: by
            ``top_k``: "switch" for 1, "gshard" for 2, "noisy_top_k" for more.
        capacity_factor: each expert has C = factor * K S / E places for a group of S tokens; with ``top_k=2`` 1.0 is
            GShard's. ``math.inf`` is a place for every token. None: no places, nothing is dropped; rows are sorted by
            expert and computed by grouped products.
        groups: into which the tokens are divided, each with places of its own. Default: one for each sequence.
        batch_axes: the axes that split the batch beside ``axis``; those that a mesh doesn't have are left out.
        hidden_axis: splits the hidden features of each expert where a mesh has it.
        length_axis: splits the length of sequences where a mesh has it, and, if it divides them, the places of each
            expert. Places are given in the order of tokens as they come: they must come in their own.
        activation: between an expert's two matrices.

    Raises:
        ShardingError: no such router, more choices than experts, no capacity; when it is called: the mesh has no such
            axis, or sizes don't divide.

    Example:
        layer = expert.MoE(features=512, hidden=2048, num_experts=8, top_k=2, axis="expert", rngs=rngs)
        y, balance = layer(x, key)
        loss = ... + balance.auxiliary_loss

    References:
        Shazeer et al., ICLR 2017 (1701.06538); Lepikhin et al., GShard, ICLR 2021 (2006.16668); Fedus et al., Switch
        Transformers, JMLR 2022 (2101.03961).
    """

    def __init__(
        self,
        *,
        features: int,
        hidden: int,
        num_experts: int,
        top_k: int = 2,
        axis: str | None = "expert",
        rngs: nnx.Rngs,
        router: RouterName | MakesRouter | None = None,
        capacity_factor: float | None = 1.25,
        groups: int | None = None,
        batch_axes: Sequence[str] = ("data", "fsdp"),
        hidden_axis: str | None = "tensor",
        length_axis: str | None = "seq",
        activation: Callable[[jax.Array], jax.Array] = jax.nn.gelu,
    ):
        sizes = {"features": features, "hidden": hidden, "num_experts": num_experts, "groups": groups}
        _check(sizes, top_k, capacity_factor)
        self.top_k, self.capacity_factor, self.groups = top_k, capacity_factor, groups
        self.axis, self.batch_axes = axis, tuple(batch_axes)
        self.hidden_axis, self.length_axis = hidden_axis, length_axis
        self.activation = activation
        self.router = _router(router, top_k)(features, num_experts, top_k, rngs=rngs)
        self.up = _normal(rngs, num_experts, features, hidden)
        self.down = _normal(rngs, num_experts, hidden, features)

    def __call__(self, x_BSM: jax.Array, key: jax.Array | None = None) -> tuple[jax.Array, Balance]:
        """The output [B, S, M] and its balance; a `key` turns on what is random in the router."""
        x_GSM, axes = self._grouped(x_BSM), self._axes()
        routing = self.router(x_GSM, key)
        experts = self._experts(x_GSM.dtype, axes)
        if self.capacity_factor is None:
            y_GSM, dropped = dropless.run(x_GSM, routing, experts, axes=axes), jnp.zeros((), jnp.int32)
        else:
            places = capacity.num_places(
                self.capacity_factor, tokens=x_GSM.shape[1], top_k=self.top_k, num_experts=len(experts.up)
            )
            y_GSM, dropped = capacity.run(x_GSM, routing, experts, capacity=places, axes=axes)
        return y_GSM.reshape(x_BSM.shape), _balance(routing, len(experts.up), dropped)

    def _axes(self) -> Axes | None:
        num_experts, _, hidden = self.up.shape
        return of_mesh(
            "expert.MoE",
            axis=self.axis,
            batch=self.batch_axes,
            hidden=self.hidden_axis,
            length=self.length_axis,
            num_experts=num_experts,
            features=hidden,
        )

    def _grouped(self, x_BSM: jax.Array) -> jax.Array:
        features = self.up.shape[1]
        if x_BSM.ndim != 3 or x_BSM.shape[-1] != features:
            must = f"tokens are [batch, length, {features}]"
            raise ShardingError("expert.MoE(...)(x)", there=f"x of shape {x_BSM.shape}", must=must)
        tokens = x_BSM.shape[0] * x_BSM.shape[1]
        if self.groups is None:
            return x_BSM
        if tokens % self.groups:
            must, near = "groups of one size", math.gcd(self.groups, tokens)
            there = f"{x_BSM.shape[0]} x {x_BSM.shape[1]} = {tokens} tokens"
            raise ShardingError(f"expert.MoE(groups={self.groups})", there=there, must=must, fix=f"groups={near}")
        return x_BSM.reshape(self.groups, -1, features)

    def _experts(self, dtype: jnp.dtype, axes: Axes | None) -> Experts:
        up, down = self.up[...].astype(dtype), self.down[...].astype(dtype)
        if axes is not None:
            hidden = axes.hidden or U
            up, down = annotate(up, P(axes.expert, U, hidden)), annotate(down, P(axes.expert, hidden, U))
        return Experts(up, down, self.activation)


def _balance(routing: Routing, num_experts: int, dropped: jax.Array) -> Balance:
    chosen_GSKE = jax.nn.one_hot(routing.experts_GSK, num_experts, dtype=jnp.int32)
    return Balance(
        auxiliary_loss=routing.auxiliary_loss,
        losses=routing.losses,
        load=jnp.sum(chosen_GSKE * routing.wanted_GSK[..., None], axis=(0, 1, 2)),
        dropped=dropped,
    )


def _normal(rngs: nnx.Rngs, num_experts: int, inward: int, outward: int) -> nnx.Param[jax.Array]:
    """Matrices of variance 1 / their inward dim, float32."""
    return nnx.Param(jax.random.normal(rngs.params(), (num_experts, inward, outward), jnp.float32) / math.sqrt(inward))


def _router(router: RouterName | MakesRouter | None, top_k: int) -> MakesRouter:
    if router is None:
        return {1: Switch, 2: GShard}.get(top_k, NoisyTopK)
    if not isinstance(router, str):
        return router
    if router not in ROUTERS:
        near = difflib.get_close_matches(router, ROUTERS, n=1, cutoff=0.3)
        must = f"one of {', '.join(map(repr, ROUTERS))}, or what makes one"
        raise ShardingError(f"expert.MoE(router={router!r})", must=must, fix=[f"router={name!r}" for name in near])
    return ROUTERS[router]


def _check(sizes: Mapping[str, int | None], top_k: int, capacity_factor: float | None) -> None:
    """Raises for all numbers that can't be, together."""
    wrong = [
        ShardingError(f"expert.MoE({name}={size})", must="at least 1")
        for name, size in sizes.items()
        if size is not None and size < 1
    ]
    num_experts = sizes["num_experts"] or 0
    if not 1 <= top_k <= num_experts:
        there, must = f"num_experts={num_experts}", "a token goes to at least one expert, and to each of them once"
        wrong.append(ShardingError(f"expert.MoE(top_k={top_k})", there=there, must=must))
    if capacity_factor is not None and not capacity_factor > 0:
        asked = f"expert.MoE(capacity_factor={capacity_factor})"
        must = "experts have places; None is for experts without, which drop nothing"
        wrong.append(ShardingError(asked, must=must, fix="capacity_factor=1.25"))
    raise_together("expert.MoE(...)", wrong)
