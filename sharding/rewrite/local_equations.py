"""Equations written so that devices run them on their own shards, where XLA's partitioner would gather the operands."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, PartitionSpec

from ..spec import Spec
from . import xla_workarounds
from .local_convolution import convolved, local_convolution
from .op_strategy import ON_SHARDS
from .update_as_scatter import scattered, scattered_dims

WRITTEN_OTHERWISE = ON_SHARDS | {"conv_general_dilated", "dynamic_update_slice"}
"""Primitives of which some equations are."""


def local_equation(
    eqn: Any, found: Sequence[Spec | None], mesh: AbstractMesh, sizes: Mapping[str, int]
) -> Callable[..., Any] | None:
    """A function of an equation's operands that computes its results on shards; None if XLA gathers nothing.

    Args:
        eqn: an equation outside of any `shard_map`, of one of the primitives `WRITTEN_OTHERWISE`.
        found: the specs of its operands and results while it runs.
        mesh: the mesh of the specs.
        sizes: the mesh axis sizes.
    """
    name = eqn.primitive.name
    if name == "dynamic_update_slice":
        dims = scattered_dims(eqn, found[-1], sizes)
        return functools.partial(scattered, dims) if dims else None
    shapes = [v.aval.shape for v in (*eqn.invars, *eqn.outvars)]
    safe = xla_workarounds.specs(name, eqn.params, shapes, found, sizes)
    specs = [b if b is not None else a for a, b in zip(found, safe, strict=True)]
    axes = [((),) * len(shape) if s is None else s.axes for s, shape in zip(specs, shapes, strict=True)]
    if name in ON_SHARDS:
        return functools.partial(_on_shards, eqn, mesh, axes) if any(map(any, axes)) else None
    plan = local_convolution(eqn.params, shapes, axes, sizes)
    return None if plan is None else functools.partial(convolved, plan, eqn.params, mesh, axes)


def _on_shards(eqn: Any, mesh: AbstractMesh, axes: Sequence[Sequence[Sequence[Any]]], *operands: jax.Array) -> Any:
    """The results of an equation with several results that needs no others' shards."""

    def local(*shards: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(eqn.primitive.bind(*shards, **eqn.params))

    specs = [PartitionSpec(*(tuple(part) or None for part in dims)) for dims in axes]
    ins, outs = tuple(specs[: len(operands)]), tuple(specs[len(operands) :])
    return jax.shard_map(local, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False)(*operands)
