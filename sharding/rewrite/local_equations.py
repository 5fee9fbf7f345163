"""Equations written so that devices run them on their own shards, where XLA's partitioner would gather the operands."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from ..rules import ON_SHARDS, Kind, Rule
from ..spec import Spec
from . import xla_workarounds
from .local_convolution import convolved, local_convolution
from .local_kernel import kernel_share, on_share
from .update_as_scatter import scattered, scattered_dims

WRITTEN_OTHERWISE = ON_SHARDS | {"conv_general_dilated", "dynamic_update_slice"}
"""Primitives of which some equations are."""


def local_equation(
    eqn: Any, rule: Rule | None, found: Sequence[Spec | None], mesh: AbstractMesh, sizes: Mapping[str, int]
) -> Callable[..., Any] | None:
    """A function of an equation's operands that computes its results on shards; None if XLA gathers nothing.

    Args:
        eqn: an equation outside of any `shard_map`, of one of the primitives `WRITTEN_OTHERWISE`.
        rule: its rule, if it has one.
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
    if name == "pallas_call":
        return functools.partial(on_share, kernel_share(rule, eqn.params, axes, sizes), eqn, mesh)
    if name in ON_SHARDS:
        return functools.partial(_on_shards, eqn, rule, mesh, axes) if rule is not None and any(map(any, axes)) else None
    plan = local_convolution(eqn.params, shapes, axes, sizes)
    return None if plan is None else functools.partial(convolved, plan, eqn.params, mesh, axes)


def _on_shards(
    eqn: Any, rule: Rule, mesh: AbstractMesh, axes: Sequence[Sequence[Sequence[Any]]], *operands: jax.Array
) -> Any:
    """The results of an equation, which each device computes from its own shards and sums as the rule says."""
    n = len(operands)
    specs = [PartitionSpec(*(tuple(part) or None for part in dims)) for dims in axes]
    over = {f: part for own, dims in zip(axes, rule.operands, strict=False) for part, fs in zip(own, dims, strict=True) for f in fs}
    sums = []
    for dims in rule.results:
        kept = {f for factors in dims for f in factors}
        found = (over.get(f, ()) for f, kind in enumerate(rule.kinds) if kind is Kind.REDUCE and f not in kept)
        sums.append(tuple(dict.fromkeys(axis for part in found for axis in part)))

    def local(*shards: jax.Array) -> tuple[jax.Array, ...]:
        params = _local_params(eqn, specs[n:], mesh)
        found = eqn.primitive.bind(*shards, **params)
        found = found if eqn.primitive.multiple_results else [found]
        return tuple(jax.lax.psum(x, part) if part else x for x, part in zip(found, sums, strict=True))

    run = jax.shard_map(local, mesh=mesh, in_specs=tuple(specs[:n]), out_specs=tuple(specs[n:]), check_vma=False)
    return run(*operands) if eqn.primitive.multiple_results else run(*operands)[0]


def _local_params(eqn: Any, specs: Sequence[PartitionSpec], mesh: AbstractMesh) -> dict[str, Any]:
    """An equation's parameters for shards of its results."""
    if eqn.primitive.name != "ffi_call":
        return eqn.params
    shapes = [
        NamedSharding(mesh, spec).shard_shape(v.aval.shape) for v, spec in zip(eqn.outvars, specs, strict=True)
    ]
    pairs = zip(eqn.params["result_avals"], shapes, strict=True)
    return {**eqn.params, "result_avals": tuple(aval.update(shape=shape) for aval, shape in pairs)}
