"""The MoE layer: routing, dispatch to experts sharded over an axis, and combine."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from ..annotations.annotate import annotate
from ..errors import ShardingError, raise_together
from . import capacity, dropless
from .expert_axes import MeshAxes, resolve_axes
from .ffn import Experts
from .gshard import GShard
from .load_balancing import Balance
from .noisy_top_k import NoisyTopK
from .routing import RouterFactory, Routing
from .switch import Switch

RouterName: TypeAlias = Literal["noisy_top_k", "gshard", "switch"]

ROUTERS: Mapping[str, RouterFactory] = {"noisy_top_k": NoisyTopK, "gshard": GShard, "switch": Switch}

U = P.UNCONSTRAINED


class MoE(nnx.Module):
    """Mixture of experts, x_BSM -> (y_BSM, `Balance`); each token gets the weighted sum of its experts' outputs.

    Its parameters are ``up`` [E, M, F] and ``down`` [E, F, M], and those of ``router``. On a mesh the experts are
    sharded over ``axis``, and so are the tokens, minor to ``batch_axes``: the batch is sharded over (data, fsdp,
    expert), in this order, and the sequence length over ``length_axis``. Results do not depend on the mesh.

    Args:
        features: M.
        hidden: F, of each expert.
        num_experts: E, a multiple of the size of ``axis``.
        top_k: experts per token.
        axis: mesh axis that shards the experts; None replicates them.
        rngs: initialises parameters from its `params` stream.
        router: a name or a factory, such as ``functools.partial(expert.GShard, loss_weight=0.1)``. Default: by
            ``top_k``: "switch" for 1, "gshard" for 2, "noisy_top_k" for more.
        capacity_factor: each expert has a capacity of C = factor * K S / E tokens per group of S; with ``top_k=2``, 1.0
            is GShard's. ``math.inf``: capacity for every token. None: dropless; rows are sorted by expert and computed
            by grouped matmuls, which are kernels on TPUs.
        groups: number of groups of tokens, each with its own capacity. Default: one per sequence.
        batch_axes: other axes that shard the batch; those absent from a mesh are ignored.
        hidden_axis: shards the hidden features of each expert; ignored if absent from a mesh.
        length_axis: shards the sequence length, and the capacity of each expert if divisible; ignored if absent from a
            mesh. Slots are assigned in array order, so tokens must come in their original order.
        activation: between an expert's two matrices.
        implementation: of the grouped matmuls of dropless experts, as for `kernels.grouped_matmul`.

    Raises:
        ShardingError: no such router, top_k above the number of experts, or a capacity_factor that is not positive;
            when called, an expert axis absent from the mesh, or indivisible sizes.

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
        router: RouterName | RouterFactory | None = None,
        capacity_factor: float | None = 1.25,
        groups: int | None = None,
        batch_axes: Sequence[str] = ("data", "fsdp"),
        hidden_axis: str | None = "tensor",
        length_axis: str | None = "seq",
        activation: Callable[[jax.Array], jax.Array] = jax.nn.gelu,
        implementation: str = "auto",
    ):
        sizes = {"features": features, "hidden": hidden, "num_experts": num_experts, "groups": groups}
        _check_arguments(sizes, top_k, capacity_factor)
        self.top_k, self.capacity_factor, self.groups = top_k, capacity_factor, groups
        self.axis, self.batch_axes = axis, tuple(batch_axes)
        self.hidden_axis, self.length_axis = hidden_axis, length_axis
        self.activation, self.implementation = activation, implementation
        self.router = _router(router, top_k)(features, num_experts, top_k, rngs=rngs)
        self.up = _expert_matrices(rngs, num_experts, features, hidden)
        self.down = _expert_matrices(rngs, num_experts, hidden, features)

    def __call__(self, x_BSM: jax.Array, key: jax.Array | None = None) -> tuple[jax.Array, Balance]:
        """The output [B, S, M] and its balance; a `key` enables the router's randomness."""
        x_GSM, axes = self._to_groups(x_BSM), self._axes()
        routing = self.router(x_GSM, key)
        experts = self._experts(x_GSM.dtype, axes)
        if self.capacity_factor is None:
            y_GSM, dropped = dropless.run(x_GSM, routing, experts, axes=axes), jnp.zeros((), jnp.int32)
        else:
            slots = capacity.expert_capacity(
                self.capacity_factor, tokens=x_GSM.shape[1], top_k=self.top_k, num_experts=len(experts.up)
            )
            y_GSM, dropped = capacity.run(x_GSM, routing, experts, capacity=slots, axes=axes)
        return y_GSM.reshape(x_BSM.shape), _balance(routing, len(experts.up), dropped)

    def _axes(self) -> MeshAxes | None:
        num_experts, _, hidden = self.up.shape
        return resolve_axes(
            "expert.MoE",
            axis=self.axis,
            batch=self.batch_axes,
            hidden=self.hidden_axis,
            length=self.length_axis,
            num_experts=num_experts,
            features=hidden,
        )

    def _to_groups(self, x_BSM: jax.Array) -> jax.Array:
        features = self.up.shape[1]
        if x_BSM.ndim != 3 or x_BSM.shape[-1] != features:
            required = f"x of shape [batch, length, {features}]"
            raise ShardingError("expert.MoE(...)(x)", found=f"x of shape {x_BSM.shape}", required=required)
        tokens = x_BSM.shape[0] * x_BSM.shape[1]
        if self.groups is None:
            return x_BSM
        if tokens % self.groups:
            raise ShardingError(
                f"expert.MoE(groups={self.groups})",
                found=f"{x_BSM.shape[0]} x {x_BSM.shape[1]} = {tokens} tokens",
                required="a number of groups that divides the tokens",
                fix=f"groups={math.gcd(self.groups, tokens)}",
            )
        return x_BSM.reshape(self.groups, -1, features)

    def _experts(self, dtype: jnp.dtype, axes: MeshAxes | None) -> Experts:
        up, down = self.up[...].astype(dtype), self.down[...].astype(dtype)
        if axes is not None:
            hidden = axes.hidden or U
            up, down = annotate(up, P(axes.expert, U, hidden)), annotate(down, P(axes.expert, hidden, U))
        return Experts(up, down, self.activation, self.implementation)


def _balance(routing: Routing, num_experts: int, dropped: jax.Array) -> Balance:
    chosen_GSKE = jax.nn.one_hot(routing.experts_GSK, num_experts, dtype=jnp.int32)
    return Balance(
        auxiliary_loss=routing.auxiliary_loss,
        losses=routing.losses,
        load=jnp.sum(chosen_GSKE * routing.wanted_GSK[..., None], axis=(0, 1, 2)),
        dropped=dropped,
    )


def _expert_matrices(rngs: nnx.Rngs, num_experts: int, fan_in: int, fan_out: int) -> nnx.Param[jax.Array]:
    """Stacked float32 matrices of variance 1 / fan_in."""
    return nnx.Param(jax.random.normal(rngs.params(), (num_experts, fan_in, fan_out), jnp.float32) / math.sqrt(fan_in))


def _router(router: RouterName | RouterFactory | None, top_k: int) -> RouterFactory:
    if router is None:
        return {1: Switch, 2: GShard}.get(top_k, NoisyTopK)
    if not isinstance(router, str):
        return router
    if router not in ROUTERS:
        near = difflib.get_close_matches(router, ROUTERS, n=1, cutoff=0.3)
        required = f"one of {', '.join(map(repr, ROUTERS))}, or a factory"
        raise ShardingError(
            f"expert.MoE(router={router!r})", required=required, fix=[f"router={name!r}" for name in near]
        )
    return ROUTERS[router]


def _check_arguments(sizes: Mapping[str, int | None], top_k: int, capacity_factor: float | None) -> None:
    """Raises one error for all invalid numbers."""
    wrong = [
        ShardingError(f"expert.MoE({name}={size})", required="at least 1")
        for name, size in sizes.items()
        if size is not None and size < 1
    ]
    num_experts = sizes["num_experts"] or 0
    if not 1 <= top_k <= num_experts:
        found, required = f"num_experts={num_experts}", f"top_k from 1 to {num_experts}"
        wrong.append(ShardingError(f"expert.MoE(top_k={top_k})", found=found, required=required))
    if capacity_factor is not None and not capacity_factor > 0:
        asked = f"expert.MoE(capacity_factor={capacity_factor})"
        required = "a positive capacity factor, or None for dropless experts"
        wrong.append(ShardingError(asked, required=required, fix="capacity_factor=1.25"))
    raise_together("expert.MoE(...)", wrong)
