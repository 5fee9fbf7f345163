"""Equations written so that devices run them on their own shards, where XLA's partitioner would gather the operands."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, PartitionSpec

from ..errors import ShardingError
from ..rules import ON_SHARDS, Kind, Rule, Shape
from ..spec import Axis, Spec, local_shape, num_parts
from . import xla_workarounds
from .local_convolution import DimAxes, convolved, local_convolution
from .local_kernel import KernelShare, local_params
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
    if name in ON_SHARDS:  # the compilers of kernels refuse a mesh around one, also without a rule
        is_sharded = name in ("pallas_call", "kernel_call") or (rule is not None and any(map(any, axes)))
        return functools.partial(_on_shards, eqn, rule, mesh, axes) if is_sharded else None
    plan = local_convolution(eqn.params, shapes, axes, sizes)
    return None if plan is None else functools.partial(convolved, plan, eqn.params, mesh, axes)


def _on_shards(eqn: Any, rule: Rule | None, mesh: AbstractMesh, axes: Sequence[DimAxes], *operands: jax.Array) -> Any:
    """The results of an equation, which each device computes from its own shards and sums as the rule says."""
    n, sizes = len(operands), dict(mesh.shape)
    specs = [PartitionSpec(*(tuple(part) or None for part in dims)) for dims in axes]
    over = {} if rule is None else _axes_of_factors(rule, axes, sizes)
    sums = [()] * len(eqn.outvars) if rule is None else _sums(rule, over)
    shapes = [local_shape(own, v.aval.shape, sizes) for v, own in zip((*eqn.invars, *eqn.outvars), axes, strict=True)]

    def local(*shards: jax.Array) -> tuple[jax.Array, ...]:
        if eqn.primitive.name == "kernel_call":
            found = eqn.params["call"].function(*shards)
        else:
            is_kernel = eqn.primitive.name == "pallas_call"
            share = KernelShare.of(rule, eqn.params, over, sizes) if is_kernel else None
            params = local_params(share, eqn.params, shapes) if share is not None else _local_params(eqn, shapes[n:])
            found = eqn.primitive.bind(*shards, **params)
            found = found if eqn.primitive.multiple_results else [found]
        _check_shapes(eqn, [x.shape for x in shards], [x.shape for x in found], shapes[n:])
        return tuple(jax.lax.psum(x, part) if part else x for x, part in zip(found, sums, strict=True))

    checks = any(getattr(v.aval, "mat", None) is not None and v.aval.mat.varying for v in (*eqn.invars, *eqn.outvars))
    run = jax.shard_map(
        local,
        mesh=mesh,
        axis_names=set(mesh.axis_names) - set(mesh.manual_axes),
        in_specs=tuple(specs[:n]),
        out_specs=tuple(specs[n:]),
        check_vma=checks,  # as the code around it
    )
    return run(*operands) if eqn.primitive.multiple_results else run(*operands)[0]


def _axes_of_factors(rule: Rule, axes: Sequence[DimAxes], sizes: Mapping[str, int]) -> dict[int, tuple[Axis, ...]]:
    """The axes that each factor is sharded over."""
    found: dict[int, tuple[Axis, ...]] = {}
    for own, dims in zip(axes, (*rule.operands, *rule.results), strict=True):
        for part, factors in zip(own, dims, strict=True):
            found |= _by_factor(part, factors, rule, sizes) if part else {}
    return found


def _sums(rule: Rule, over: Mapping[int, tuple[Axis, ...]]) -> list[tuple[Axis, ...]]:
    """For each result, the axes to add it over: those of the summed factors that it doesn't have."""
    sums = []
    for dims in rule.results:
        kept = {f for factors in dims for f in factors}
        found = (over.get(f, ()) for f, kind in enumerate(rule.kinds) if kind is Kind.REDUCE and f not in kept)
        sums.append(tuple(dict.fromkeys(axis for part in found for axis in part)))
    return sums


def _by_factor(
    axes: Sequence[Axis], factors: Sequence[int], rule: Rule, sizes: Mapping[str, int]
) -> dict[int, tuple[Axis, ...]]:
    """The axes of one dim, major first, by the factors that they shard."""
    left, found = list(axes), {}
    for f in factors:
        own: tuple[Axis, ...] = ()
        while left and num_parts(own, sizes) < rule.sizes[f]:
            own = (*own, left.pop(0))
        found[f] = own
    return found


def _local_params(eqn: Any, shapes: Sequence[Shape]) -> dict[str, Any]:
    """An equation's parameters for shards of its results, of given shapes."""
    if eqn.primitive.name != "ffi_call":
        return eqn.params
    avals = (a.update(shape=shape) for a, shape in zip(eqn.params["result_avals"], shapes, strict=True))
    return {**eqn.params, "result_avals": tuple(avals)}


def _check_shapes(eqn: Any, ins: Sequence[Shape], found: Sequence[Shape], expected: Sequence[Shape]) -> None:
    if tuple(found) != tuple(expected):
        call = eqn.params.get("call")
        raise ShardingError(
            f"{getattr(call, 'name', eqn.primitive.name)} on shards of shape {', '.join(map(str, ins))}",
            found=f"results of shape {', '.join(map(str, found))}",
            required=f"{', '.join(map(str, expected))}, by its rule",
            fix="`need_replication` for the factors that its results need whole",
        )
