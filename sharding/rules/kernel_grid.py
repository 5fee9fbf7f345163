"""Which factors of a Pallas kernel's rule can be sharded: those that split its grid.

A `pallas_call` visits the blocks of its arrays by index maps of the program ids. Where the maps of all arrays move by
whole blocks with one axis of the grid, and with no other dim, each device can run its part of the grid on its own
shards: no program reads or writes other blocks than before. So a factor of a registered rule is split as far as its
blocks go, and is replicated while the kernel runs if it can't be. That programs along it pass nothing on to each other
in scratch memory, except for a sum, is what the rule says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh

from .. import compat
from .rule import Dims, Kind, Rule

MAX_PROGRAMS = 2**20
"""The most programs of a grid whose index maps are evaluated."""


@dataclass(frozen=True, slots=True)
class GridSplit:
    """How a factor splits the grid of a kernel."""

    grid_axis: int
    parts: int
    """The most parts; every divisor is possible, too."""


def grid_splits(rule: Rule, params: Mapping[str, Any]) -> dict[int, GridSplit]:
    """Returns how the factors of a rule split a kernel's grid; those that don't are missing.

    Args:
        rule: the rule that is registered for the kernel.
        params: the parameters of the `pallas_call`.
    """
    mapping, body = params["grid_mapping"], params["jaxpr"]
    grid, skip = mapping.grid, num_scalar_operands(mapping)
    arrays = (*rule.operands, *rule.results)
    if mapping.get_grid_indices is not None or len(arrays) != skip + len(mapping.block_mappings):
        return {}
    walks = [_Walk.of(block, grid) for block in mapping.block_mappings]
    found = {}
    for f, kind in enumerate(rule.kinds):
        is_prefetched = any(f in factors for dims in arrays[:skip] for factors in dims)
        if (
            is_prefetched
            or kind not in (Kind.PASS, Kind.REDUCE)
            or (kind is Kind.REDUCE and params["input_output_aliases"])
        ):
            continue
        options = [
            GridSplit(j, parts)
            for j, size in enumerate(grid)
            if isinstance(size, int)
            and (parts := _parts(f, rule, arrays[skip:], walks, j, size)) > 1
            and (kind is Kind.PASS or tests_only_ends(body, program_axis(mapping, j), size))
        ]
        if len(options) == 1:
            found[f] = options[0]
    taken = [split.grid_axis for split in found.values()]
    return {f: split for f, split in found.items() if taken.count(split.grid_axis) == 1}


def num_scalar_operands(mapping: Any) -> int:
    """The number of a kernel's operands that are not arrays of blocks: bounds of the grid and prefetched scalars."""
    return sum(not isinstance(n, int) for n in mapping.grid) + mapping.num_index_operands


def program_axis(mapping: Any, grid_axis: int) -> int | None:
    """The axis that a kernel's body knows a grid axis by; None for one added by `vmap`, which it doesn't know."""
    if grid_axis in mapping.vmapped_dims:
        return None
    return grid_axis - sum(v < grid_axis for v in mapping.vmapped_dims)


def on_grid(rule: Rule, params: Mapping[str, Any]) -> Rule:
    """Returns a kernel's rule with each factor split into what the grid can share out and what stays whole."""
    splits = grid_splits(rule, params)
    sizes, kinds, blocked = list(rule.sizes), list(rule.kinds), set(rule.blocked)
    minor: dict[int, int] = {}
    for f, size in enumerate(rule.sizes):
        parts = splits[f].parts if f in splits else 1
        if parts == size:
            continue
        whole = f
        if parts > 1:
            whole = minor[f] = len(sizes)
            sizes[f] = parts
            sizes.append(size // parts)
            kinds.append(Kind.REPLICATE)
        kinds[whole] = Kind.REPLICATE
        blocked.add(whole)

    def split(arrays: tuple[Dims, ...]) -> tuple[Dims, ...]:
        return tuple(
            tuple(tuple(g for f in factors for g in ((f, minor[f]) if f in minor else (f,))) for factors in dims)
            for dims in arrays
        )

    return replace(
        rule,
        operands=split(rule.operands),
        results=split(rule.results),
        sizes=tuple(sizes),
        kinds=tuple(kinds),
        blocked=frozenset(blocked),
    )


def tests_only_ends(body: Any, axis: int | None, size: int) -> bool:
    """Whether a kernel uses the program id of a grid axis only to tell the first and the last program.

    It can then sum over its part of the axis alone: what is first and last there is known.
    """
    if axis is None:
        return True
    source, ids = compat.open_jaxpr(body), set()
    for eqn in source.eqns:
        name = eqn.primitive.name
        reads = [v for v in eqn.invars if not compat.is_literal(v) and v in ids]
        if (name == "program_id" and eqn.params["axis"] == axis) or (reads and name == "convert_element_type"):
            ids.update(eqn.outvars)
        elif reads:
            others = [int(v.val) for v in eqn.invars if compat.is_literal(v)]
            if name != "eq" or len(reads) != 1 or others not in ([0], [size - 1]):
                return False
        if not all(tests_only_ends(inner, axis, size) for _, _, inner in compat.sub_jaxprs(eqn.params)):
            return False
    return ids.isdisjoint(v for v in source.outvars if not compat.is_literal(v))


@dataclass(frozen=True, slots=True)
class _Index:
    """The index of an array's block along one dim."""

    axes: frozenset[int]
    """The axes of the grid that it depends on."""
    values: np.ndarray | None
    """By program, with length 1 along other axes; None if it depends on data, too."""

    def moves(self, axis: int, step: int, moved: int) -> bool:
        """Whether it grows by `moved` with each `step` along an axis of the grid, from the first block on."""
        if axis not in self.axes:
            return moved == 0
        if self.values is None:
            return False
        along = np.moveaxis(self.values, axis, 0)
        grows = bool((along[step:] - along[:-step] == moved).all())
        return grows and (not moved or bool(((along[:step] >= 0) & (along[:step] < moved)).all()))


@dataclass(frozen=True, slots=True)
class _Walk:
    """How a kernel visits the blocks of one array."""

    block: tuple[int, ...]
    """Elements of a block along each dim; 0 where blocks are not on a regular grid."""
    indices: tuple[_Index, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, mapping: Any, grid: Sequence[Any]) -> _Walk:
        block = tuple(_length(dim) for dim in mapping.block_shape)
        index_map = mapping.index_map_jaxpr
        indices = tuple(_index(index_map, out, grid) for out in compat.open_jaxpr(index_map).outvars[: len(block)])
        return cls(block, indices, mapping.array_aval.shape)

    def num_blocks(self, d: int) -> int:
        """The number of blocks along a dim, 1 if they don't divide it."""
        block, size = self.block[d], self.shape[d]
        return size // block if block and size % block == 0 else 1


def _length(dim: Any) -> int:
    if dim is None or type(dim).__name__ == "Squeezed":
        return 1
    if isinstance(dim, int):
        return dim
    return dim.block_size if type(dim).__name__ == "Blocked" else 0


def _parts(f: int, rule: Rule, arrays: Sequence[Dims], walks: Sequence[_Walk], axis: int, programs: int) -> int:
    """The most parts of a factor that an axis of the grid can be split into, 1 if it can't."""
    dims = [(a, d) for a, own in enumerate(arrays) for d, factors in enumerate(own) if f in factors]
    if not all(_is_major(f, arrays[a][d], rule) for a, d in dims):
        return 1
    most = math.gcd(programs, rule.sizes[f], *(walks[a].num_blocks(d) for a, d in dims))

    def is_possible(parts: int) -> bool:
        steps = (
            (index, walk.num_blocks(d) // parts if (a, d) in dims else 0)
            for a, walk in enumerate(walks)
            for d, index in enumerate(walk.indices)
        )
        return all(index.moves(axis, programs // parts, moved) for index, moved in steps)

    return next((n for n in range(most, 1, -1) if most % n == 0 and is_possible(n)), 1)


def _is_major(f: int, factors: Sequence[int], rule: Rule) -> bool:
    return next((g for g in factors if rule.sizes[g] > 1), f) == f


def _index(index_map: Any, out: Any, grid: Sequence[Any]) -> _Index:
    """What a result of an index map depends on, and its values."""
    source = compat.open_jaxpr(index_map)
    ids = list(source.invars[: len(grid)])
    if compat.is_literal(out):
        return _Index(frozenset(), np.full((1,) * len(grid), int(out.val)))
    needed = _needed(source, out)
    used = frozenset(j for j, v in enumerate(ids) if v in needed)
    is_known = needed <= {*ids, *(v for eqn in source.eqns for v in eqn.outvars)}
    sizes = [n if j in used else 1 for j, n in enumerate(grid)]
    if not is_known or not all(isinstance(n, int) for n in sizes) or math.prod(sizes) > MAX_PROGRAMS:
        return _Index(used, None)
    points = np.indices(sizes, np.int32).reshape(len(grid), -1)
    values = points[ids.index(out)] if out in ids else _evaluated(index_map, out, needed, points)
    return _Index(used, values.reshape(sizes))


def _needed(jaxpr: Any, out: Any) -> set[Any]:
    """The variables that a result of a jaxpr is computed from, with itself."""
    needed = {out}
    for eqn in reversed(jaxpr.eqns):
        if not needed.isdisjoint(eqn.outvars):
            needed.update(v for v in eqn.invars if not compat.is_literal(v))
    return needed


def _evaluated(index_map: Any, out: Any, needed: set[Any], points: np.ndarray) -> np.ndarray:
    source = compat.open_jaxpr(index_map)
    ids = list(source.invars[: len(points)])
    eqns = [eqn for eqn in source.eqns if not needed.isdisjoint(eqn.outvars)]
    alone = compat.rebuild(index_map, eqns=eqns, outvars=[out], invars=ids)
    one = compat.jaxpr_fun(alone)
    cpu, no_mesh = jax.local_devices(backend="cpu")[0], AbstractMesh((), ())
    with jax.ensure_compile_time_eval(), jax.sharding.use_abstract_mesh(no_mesh), jax.default_device(cpu):
        (found,) = jax.jit(jax.vmap(one))(*points)
    return np.asarray(found)
