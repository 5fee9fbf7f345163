"""A Pallas kernel on each device's shards: every device runs its part of the kernel's grid.

XLA can't partition a `pallas_call`: it gathers the operands, or refuses to compile. Inside a `shard_map`, a device runs
the programs of the grid that visit its shards, with the index maps unchanged. Where the kernel reads a program id, it
gets the id in the whole grid. Along a summed dim it gets the ids of its part, so that it starts and ends a sum of its
own; these are then added.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from .. import compat
from ..rules import Kind, Rule
from ..rules.kernel_grid import GridSplit, grid_splits, num_scalar_operands, program_axis
from ..spec import num_parts
from .local_convolution import DimAxes


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelShare:
    """The part of a kernel's grid that one device runs."""

    axes: Mapping[int, tuple[str, ...]]
    """Grid axis -> the mesh axes that it is split over."""
    parts: Mapping[int, int]
    """Grid axis -> the number of parts."""
    is_sum: Mapping[int, bool]
    """Grid axis -> whether the results of its parts are added."""
    specs: Sequence[PartitionSpec]
    """Of the operands and results."""

    @property
    def summed(self) -> tuple[str, ...]:
        """The mesh axes to add the results over."""
        return tuple(a for j, axes in self.axes.items() if self.is_sum[j] for a in axes)


def kernel_share(
    rule: Rule | None, params: Mapping[str, Any], axes: Sequence[DimAxes], sizes: Mapping[str, int]
) -> KernelShare:
    """Returns the part of a kernel's grid that each device runs.

    Args:
        rule: the kernel's registered rule, or None: then each device runs the whole grid on whole arrays.
        params: the parameters of the `pallas_call`.
        axes: the mesh axes of each dim of the operands and results, as the rule allows.
        sizes: the mesh axis sizes.
    """
    splits: dict[int, GridSplit] = grid_splits(rule, params) if rule is not None else {}
    found: dict[int, tuple[str, ...]] = {}
    sums: dict[int, bool] = {}
    for f, split in splits.items():
        assert rule is not None
        arrays = zip(axes, (*rule.operands, *rule.results), strict=True)
        used = (own[d] for own, dims in arrays for d, factors in enumerate(dims) if f in factors)
        if over := next((tuple(map(str, one)) for one in used if one), ()):
            found[split.grid_axis], sums[split.grid_axis] = over, rule.kinds[f] is Kind.REDUCE
    return KernelShare(
        axes=found,
        parts={j: num_parts(over, sizes) for j, over in found.items()},
        is_sum=sums,
        specs=[PartitionSpec(*(tuple(part) or None for part in dims)) for dims in axes],
    )


def on_share(share: KernelShare, eqn: Any, mesh: AbstractMesh, *operands: jax.Array) -> list[jax.Array]:
    """The results of a `pallas_call` equation, of which every device runs its share."""

    def local(*shards: jax.Array) -> list[jax.Array]:
        found = eqn.primitive.bind(*shards, **_parameters(share, eqn.params, shards))
        return [jax.lax.psum(x, share.summed) for x in found] if share.summed else list(found)

    n = len(operands)
    run = jax.shard_map(
        local, mesh=mesh, in_specs=tuple(share.specs[:n]), out_specs=list(share.specs[n:]), check_vma=False
    )
    return run(*operands)


def _parameters(share: KernelShare, params: Mapping[str, Any], shards: Sequence[jax.Array]) -> dict[str, Any]:
    """The parameters of the call of one device."""
    mapping = params["grid_mapping"]
    grid = tuple(n // share.parts[j] if j in share.parts else n for j, n in enumerate(mapping.grid))
    specs = share.specs[num_scalar_operands(mapping) :]
    blocks = [_local(block, spec, mesh_sizes()) for block, spec in zip(mapping.block_mappings, specs, strict=True)]
    outs = blocks[len(blocks) - len(params["out_avals"]) :]
    avals = [aval.update(shape=b.array_aval.shape) for aval, b in zip(params["out_avals"], outs, strict=True)]
    found = dict(params)
    found["grid_mapping"] = dataclasses.replace(mapping, grid=grid, block_mappings=tuple(blocks))
    found["out_avals"] = tuple(avals)
    found["jaxpr"] = _body(share, params["jaxpr"], mapping)
    if (cost := params["cost_estimate"]) is not None:
        names, whole = ("flops", "transcendentals", "bytes_accessed"), math.prod(share.parts.values())
        found["cost_estimate"] = dataclasses.replace(cost, **{n: getattr(cost, n) // whole for n in names})
    return found


def mesh_sizes() -> Mapping[str, int]:
    """The sizes of the mesh axes that are being mapped over."""
    return dict(jax.sharding.get_abstract_mesh().shape)


def _local(block: Any, spec: PartitionSpec, sizes: Mapping[str, int]) -> Any:
    """A block mapping whose array is one device's shard."""
    parts = [num_parts(tuple(one) if isinstance(one, tuple) else (one,) if one else (), sizes) for one in spec]
    shape = block.array_aval.shape
    local = tuple(n // p for n, p in zip(shape, (*parts, *[1] * (len(shape) - len(parts))), strict=True))
    index_map = _in_shard_map(block.index_map_jaxpr)
    return dataclasses.replace(block, array_aval=block.array_aval.update(shape=local), index_map_jaxpr=index_map)


def _body(share: KernelShare, body: Any, mapping: Any) -> Any:
    """A kernel's jaxpr with program ids of the whole grid, or with the last one of a sum at the end of its part."""
    for j, axes in share.axes.items():
        axis, whole = program_axis(mapping, j), mapping.grid[j]
        part = whole // share.parts[j]
        if axis is not None:
            change = _EndOfPart(axis, whole - 1, part - 1) if share.is_sum[j] else _Offset(axis, axes, part)
            body = _changed(body, change)
    return _in_shard_map(body)


def _changed(jaxpr: Any, change: Callable[[Any], list[Any]]) -> Any:
    """A jaxpr with each equation replaced, in its bodies, too."""
    source, eqns = compat.open_jaxpr(jaxpr), []
    for eqn in source.eqns:
        params, effects = eqn.params, eqn.effects
        for key, position, inner in compat.sub_jaxprs(params):
            new = _changed(inner, change)
            effects = effects | _new_effects(inner, new)
            params = compat.with_jaxpr(params, key, position, new)
        eqns += change(eqn if params is eqn.params else eqn.replace(params=params, effects=effects))
    found = compat.rebuild(jaxpr, eqns=eqns, outvars=source.outvars)
    known = set().union(*(eqn.effects for eqn in source.eqns))
    added = set().union(*(eqn.effects for eqn in eqns)) - known
    return found.replace(effects=found.effects | added) if added else found


def _new_effects(old: Any, new: Any) -> set[Any]:
    return set(new.effects) - set(old.effects)


def _in_shard_map(jaxpr: Any) -> Any:
    """A jaxpr whose equations and variables have the mesh of the current trace, on which all axes are manual."""
    (like,) = _traced(lambda x: x + 1, np.int32(0)).eqns
    names: dict[Any, Any] = {}

    def here(var: Any) -> Any:
        if compat.is_literal(var) or compat.is_drop(var):
            return var
        return names.setdefault(var, compat.new_var(_aval_here(var.aval)))

    source, eqns = compat.open_jaxpr(jaxpr), []
    for eqn in source.eqns:
        params = {key: _here(value) if isinstance(value, NamedSharding) else value for key, value in eqn.params.items()}
        for key, position, inner in compat.sub_jaxprs(params):
            params = compat.with_jaxpr(params, key, position, _in_shard_map(inner))
        invars, outvars = [*map(here, eqn.invars)], [*map(here, eqn.outvars)]
        eqns.append(eqn.replace(invars=invars, outvars=outvars, params=params, ctx=like.ctx))
    invars, outvars = [*map(here, source.invars)], [*map(here, source.outvars)]
    return compat.rebuild(jaxpr, eqns=eqns, invars=invars, outvars=outvars)


def _aval_here(aval: Any) -> Any:
    if hasattr(aval, "inner_aval"):
        return aval.update(inner_aval=_aval_here(aval.inner_aval))
    sharding = getattr(aval, "sharding", None)
    return aval if sharding is None else aval.update(sharding=_here(sharding))


def _here(sharding: NamedSharding) -> NamedSharding:
    return sharding.update(mesh=jax.sharding.get_abstract_mesh())


def _traced(f: Callable[..., Any], *args: Any) -> Any:
    return compat.open_jaxpr(jax.make_jaxpr(f)(*args))


@dataclass(frozen=True, slots=True)
class _Offset:
    """Program ids of an axis begin at the first program of a device's part."""

    axis: int
    mesh_axes: tuple[str, ...]
    part: int

    def __call__(self, eqn: Any) -> list[Any]:
        if eqn.primitive.name != "program_id" or eqn.params["axis"] != self.axis:
            return [eqn]
        (in_whole,) = eqn.outvars
        traced = _traced(self.add, in_whole.aval)
        names = {traced.invars[0]: compat.new_var(in_whole.aval)}
        eqns = [compat.renamed(one, names) for one in traced.eqns]
        last = eqns[-1].replace(outvars=[in_whole])
        return [eqn.replace(outvars=[names[traced.invars[0]]]), *eqns[:-1], last]

    def add(self, program_id: jax.Array) -> jax.Array:
        return program_id + jax.lax.axis_index(self.mesh_axes).astype(program_id.dtype) * self.part


@dataclass(frozen=True, slots=True)
class _EndOfPart:
    """Tests for the last program of an axis test for the last one of a device's part."""

    axis: int
    old: int
    new: int
    ids: set[Any] = field(default_factory=set)

    def __call__(self, eqn: Any) -> list[Any]:
        name = eqn.primitive.name
        is_read = any(not compat.is_literal(v) and v in self.ids for v in eqn.invars)
        if (name == "program_id" and eqn.params["axis"] == self.axis) or (is_read and name == "convert_element_type"):
            self.ids.update(eqn.outvars)
        if not is_read or name != "eq":
            return [eqn]
        return [eqn.replace(invars=[self.end(v) if compat.is_literal(v) else v for v in eqn.invars])]

    def end(self, literal: Any) -> Any:
        return compat.new_literal(self.new, literal.aval) if int(literal.val) == self.old else literal
