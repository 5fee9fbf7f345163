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
import jax.extend.core as jex
import numpy as np
from jax.sharding import NamedSharding

from .. import compat
from ..rules import Kind, Rule, Shape
from ..rules.kernel_grid import grid_splits, num_scalar_operands, program_axis
from ..spec import Axis, num_parts


@dataclass(frozen=True, slots=True)
class GridPart:
    """The part of one axis of a kernel's grid that one device runs."""

    axes: tuple[Axis, ...]
    """The mesh axes that the grid axis is split over."""
    count: int
    """The number of parts."""
    is_sum: bool
    """Whether the results of the parts are added."""


@dataclass(frozen=True, slots=True)
class KernelShare:
    """The part of a kernel's grid that one device runs."""

    parts: Mapping[int, GridPart]
    """By axis of the grid; other axes run whole."""

    @classmethod
    def of(
        cls,
        rule: Rule | None,
        params: Mapping[str, Any],
        over: Mapping[int, tuple[Axis, ...]],
        sizes: Mapping[str, int],
    ) -> KernelShare:
        """Returns the share of each device.

        Args:
            rule: the kernel's registered rule, or None: then each device runs the whole grid on whole arrays.
            params: the parameters of the `pallas_call`.
            over: the axes that each factor of the rule is sharded over.
            sizes: the mesh axis sizes.
        """
        if rule is None:
            return cls({})
        split = {s.grid_axis: f for f, s in grid_splits(rule, params).items() if over.get(f)}
        return cls(
            {j: GridPart(over[f], num_parts(over[f], sizes), rule.kinds[f] is Kind.REDUCE) for j, f in split.items()}
        )


def local_params(share: KernelShare, params: Mapping[str, Any], shapes: Sequence[Shape]) -> dict[str, Any]:
    """The parameters of a `pallas_call` that runs a device's share, in a `shard_map`.

    Args:
        share: the part of its grid.
        params: its parameters.
        shapes: of the shards of its operands and results.
    """
    mapping = params["grid_mapping"]
    grid = tuple(n // share.parts[j].count if j in share.parts else n for j, n in enumerate(mapping.grid))
    pairs = zip(mapping.block_mappings, shapes[num_scalar_operands(mapping) :], strict=True)
    avals = zip(params["out_avals"], shapes[len(shapes) - len(params["out_avals"]) :], strict=True)
    found = dict(params)
    found["grid_mapping"] = dataclasses.replace(
        mapping, grid=grid, block_mappings=tuple(_on_shard(block, shape) for block, shape in pairs)
    )
    found["out_avals"] = tuple(_aval_here(aval.update(shape=shape)) for aval, shape in avals)
    found["jaxpr"] = _body(share, params["jaxpr"], mapping)
    if (cost := params["cost_estimate"]) is not None:
        names, whole = ("flops", "transcendentals", "bytes_accessed"), math.prod(p.count for p in share.parts.values())
        found["cost_estimate"] = dataclasses.replace(cost, **{n: getattr(cost, n) // whole for n in names})
    return found


def _on_shard(block: Any, shape: Shape) -> Any:
    """A block mapping whose array is a shard."""
    index_map = _in_shard_map(block.index_map_jaxpr)
    return dataclasses.replace(
        block, array_aval=_aval_here(block.array_aval.update(shape=shape)), index_map_jaxpr=index_map
    )


def _body(share: KernelShare, body: Any, mapping: Any) -> Any:
    """A kernel's jaxpr with program ids of the whole grid, or with the last one of a sum at the end of its part."""
    for j, part in share.parts.items():
        axis, whole = program_axis(mapping, j), mapping.grid[j]
        size = whole // part.count
        if axis is not None:
            change = _EndOfPart(axis, whole - 1, size - 1) if part.is_sum else _Offset(axis, part.axes, size)
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
        if compat.is_drop(var):
            return var
        if compat.is_literal(var):
            return compat.new_literal(var.val, _aval_here(var.aval))
        return names.setdefault(var, jex.Var(_aval_here(var.aval)))

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
    mesh_axes: tuple[Axis, ...]
    part: int

    def __call__(self, eqn: Any) -> list[Any]:
        if eqn.primitive.name != "program_id" or eqn.params["axis"] != self.axis:
            return [eqn]
        (in_whole,) = eqn.outvars
        traced = _traced(self.add, in_whole.aval)
        names = {traced.invars[0]: jex.Var(in_whole.aval)}
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
