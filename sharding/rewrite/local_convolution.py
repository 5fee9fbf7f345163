"""A grouped convolution on each device's shards, in a `shard_map`.

XLA partitions none, unless each feature is a group: on CPUs and GPUs it gathers the whole batch, forward and for the
kernel's gradient. Along the batch and along groups nothing has to be sent, along summed input features one sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, PartitionSpec

from ..spec import Axis, num_parts

DimAxes = Sequence[Sequence[Axis]]
"""The axes of each dim of one array."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalConvolution:
    """How each device convolves its shards."""

    batch_groups: int
    feature_groups: int
    summed: tuple[Axis, ...]
    """The axes to sum the result over."""


def is_grouped(params: Mapping[str, Any]) -> bool:
    """Whether a convolution has feature or batch groups."""
    return params["feature_group_count"] > 1 or params["batch_group_count"] > 1


def is_depthwise(params: Mapping[str, Any], rhs: Sequence[int]) -> bool:
    """Whether each input feature is a group; XLA partitions the batch and the spatial dims of such a convolution."""
    return params["batch_group_count"] == 1 and rhs[params["dimension_numbers"].rhs_spec[1]] == 1


def local_convolution(
    params: Mapping[str, Any], shapes: Sequence[Sequence[int]], axes: Sequence[DimAxes], sizes: Mapping[str, int]
) -> LocalConvolution | None:
    """How the shards of a grouped convolution are convolved, None if devices need others' shards, or XLA partitions it.

    Args:
        params: the equation's parameters.
        shapes: the global shapes of both operands and of the result.
        axes: the axes of their dims.
        sizes: the mesh axis sizes.
    """
    numbers = params["dimension_numbers"]
    batch_groups, groups = params["batch_group_count"], params["feature_group_count"]
    (batch, feature, *_), (out_feature, in_feature, *_) = numbers.lhs_spec, numbers.rhs_spec
    (out_batch, out_channel, *_) = numbers.out_spec
    by_batch = [(0, batch), (2, out_batch)] if batch_groups == 1 else []
    by_sum = [(0, feature), (1, in_feature)] if groups == 1 else []
    by_group = [(0, feature if groups > 1 else batch), (1, out_feature), (2, out_channel)]
    sharded = {(t, d) for t, dims in enumerate(axes) for d, part in enumerate(dims) if part}
    if not is_grouped(params):
        return None
    for dims in (by_batch, by_sum, by_group):
        found = {tuple(axes[t][d]) for t, d in dims}
        if len(found) > 1 or any(not isinstance(axis, str) for part in found for axis in part):
            return None
        if any(shapes[t][d] % num_parts(tuple(axes[t][d]), sizes) for t, d in dims):
            return None
    if not sharded or not sharded <= {*by_batch, *by_sum, *by_group}:
        return None
    parts = num_parts(tuple(axes[2][out_channel]), sizes)
    if max(groups, batch_groups) % parts:
        return None
    if parts == 1 and is_depthwise(params, shapes[1]):
        return None
    return LocalConvolution(
        batch_groups=batch_groups // parts if batch_groups > 1 else 1,
        feature_groups=groups // parts if groups > 1 else 1,
        summed=tuple(axes[1][in_feature]),
    )


def convolved(
    plan: LocalConvolution,
    params: Mapping[str, Any],
    mesh: AbstractMesh,
    axes: Sequence[DimAxes],
    lhs: jax.Array,
    rhs: jax.Array,
) -> jax.Array:
    """The convolution of arrays that are sharded over some axes."""
    local = dict(params) | {"batch_group_count": plan.batch_groups, "feature_group_count": plan.feature_groups}

    def on_shards(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        result = jax.lax.conv_general_dilated_p.bind(lhs, rhs, **local)
        return jax.lax.psum(result, plan.summed) if plan.summed else result

    *operands, result = (PartitionSpec(*(tuple(part) or None for part in dims)) for dims in axes)
    return jax.shard_map(on_shards, mesh=mesh, in_specs=tuple(operands), out_specs=result, check_vma=False)(lhs, rhs)
