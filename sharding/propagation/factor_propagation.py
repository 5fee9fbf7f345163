"""Propagation through one op: how its arrays' shardings expand, given their current shardings.

This is Shardy's aggressive strategy: every factor takes the compatible major axes of its arrays, and conflicts between
factors go to the larger source. The result depends on the op's form and the shardings alone, so it is computed once
for all ops of a deep model that share these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..rules import Dims, Flow
from .axis_atoms import Atoms
from .interned_shardings import ValueSharding
from .op_priorities import BACKWARD, BOTH, NONE
from .propagation_graph import OpForm


class Origin(NamedTuple):
    """The array of the same op, and its dim, that one atom of a dim came from."""

    dim: int
    atom: int
    source: int
    source_dim: int


class Expansion(NamedTuple):
    """The expanded sharding of one array of an op."""

    array: int
    sharding: ValueSharding
    origins: tuple[Origin, ...]


class FactorShardings(NamedTuple):
    """The sharding of one array projected to factors."""

    factors: dict[int, Atoms]
    overflow: frozenset[int]
    """Atoms that fit no factor."""
    closed: set[int]
    """Factors that cannot expand."""


def expansions(
    form: OpForm, level: int, shardings: Sequence[ValueSharding], atom_sizes: Sequence[int]
) -> tuple[Expansion, ...]:
    """Returns the expansions by one visit of an op at a level.

    Args:
        form: the op's.
        level: the op priority, which sets the directions of propagation.
        shardings: the current sharding of each array, operands before results.
        atom_sizes: the size of each atom.
    """
    rule, n, directions = form.rule, form.num_operands, form.directions[level]
    projected = [project(form, a, sharding, atom_sizes) for a, sharding in enumerate(shardings)]
    compatible: dict[int, Atoms] = {}
    for factor in sorted({f for one in projected for f, atoms in one.factors.items() if atoms}):
        axes = _compatible_major_axes(projected, factor, n, directions[factor])
        if axes:
            compatible[factor] = axes
    if not any(_extends(axes, one.factors.get(f, axes)) for f, axes in compatible.items() for one in projected):
        return ()
    elementwise = rule.flow is Flow.ELEMENTWISE
    order, sources = _factor_order(compatible, projected, rule.sizes, atom_sizes if elementwise else None)
    expanded: dict[int, list[int]] = {}
    for a in (*range(n, len(shardings)), *range(n)):
        for factor in order:
            new = _applicable(compatible[factor], factor, form, a, projected[a], shardings[a].reserved, atom_sizes)
            if new and a < n and elementwise:
                new = _limited_by_results(new, factor, projected[n:])
            if new and _extends(new, projected[a].factors[factor]):
                projected[a].factors[factor] = new
                expanded.setdefault(a, []).append(factor)
    origins = {f: (a, dim_of(f, form.arrays[a])) for f, a in sources.items()}
    now = dict(enumerate(shardings))  # by the first array of each value: one value may be two of the arrays
    found = []
    for a in sorted(expanded):
        first = form.firsts[a]
        expansion = _expansion(form, a, expanded[a], projected[a], origins, now[first], atom_sizes)
        if expansion is not None:
            now[first] = expansion.sharding
            found.append(expansion)
    return tuple(found)


def project(form: OpForm, array: int, sharding: ValueSharding, atom_sizes: Sequence[int]) -> FactorShardings:
    """Projects the sharding of an array's dims to factors."""
    axes, closed_dims = sharding.axes, sharding.closed
    if form.simple[array]:
        dims = [dim[0] for dim in form.arrays[array]]
        closed = {f for f, c in zip(dims, closed_dims, strict=True) if c}
        return FactorShardings(dict(zip(dims, axes, strict=True)), frozenset(), closed)
    factors: dict[int, Atoms] = {}
    overflow: set[int] = set()
    closed: set[int] = set()
    for d, dim in enumerate(form.arrays[array]):
        rest, over = axes[d], False
        for k, f in enumerate(dim):
            if closed_dims[d] or over:
                closed.add(f)
            if over or k == len(dim) - 1:
                factors[f] = () if over else rest
                rest = ()
                continue
            room, taken = form.rule.sizes[f], 0
            while taken < len(rest) and room % atom_sizes[rest[taken]] == 0:
                room //= atom_sizes[rest[taken]]
                taken += 1
            factors[f], rest = rest[:taken], rest[taken:]
            if room > 1 and rest:
                overflow.update(rest)
                closed.add(f)
                over, rest = True, ()
    return FactorShardings(factors, frozenset(overflow), closed)


def dim_of(factor: int, dims: Dims) -> int:
    """Returns the dim of an array that has a factor."""
    return next(d for d, dim in enumerate(dims) if factor in dim)


def _compatible_major_axes(
    projected: Sequence[FactorShardings], factor: int, num_operands: int, direction: int
) -> Atoms:
    """Returns the longest axes of a factor, major first, that its arrays agree on."""
    if direction == NONE:
        return ()
    groups = (projected[:num_operands], projected[num_operands:])
    axes: Atoms = ()
    expand = True
    for second, group in enumerate(groups if direction != BACKWARD else reversed(groups)):
        expand = expand and not (second and direction != BOTH)
        for factors, _, _ in group:
            new = factors.get(factor)
            if new is None or new == axes:
                continue
            k = min(len(axes), len(new))
            if axes[:k] != new[:k]:
                k = next(i for i in range(k) if axes[i] != new[i])
                axes, expand = axes[:k], False
            elif len(new) > k and expand:
                axes = new
    return axes


def _factor_order(
    compatible: Mapping[int, Atoms],
    projected: Sequence[FactorShardings],
    sizes: Sequence[int],
    atom_sizes: Sequence[int] | None,
) -> tuple[list[int], dict[int, int]]:
    """Returns the factors in the order in which they may take axes, and the source array of each.

    Larger source first; for elementwise ops (those with `atom_sizes`) the factor with more shards; then the earlier
    array and factor.
    """
    totals = [math.prod(sizes[f] for f in factors) for factors, _, _ in projected]
    sources, keys = {}, {}
    for f, axes in compatible.items():
        holders = [a for a, (factors, _, _) in enumerate(projected) if factors.get(f, ())[: len(axes)] == axes]
        sources[f] = max(holders, key=lambda a: (totals[a], -a))
        num_shards = math.prod(atom_sizes[atom] for atom in axes) if atom_sizes is not None else 1
        keys[f] = (-totals[sources[f]], -num_shards, sources[f], f)
    return sorted(compatible, key=keys.__getitem__), sources


def _applicable(
    axes: Atoms,
    factor: int,
    form: OpForm,
    array: int,
    projected: FactorShardings,
    reserved: frozenset[int],
    atom_sizes: Sequence[int],
) -> Atoms:
    """Returns the prefix of `axes` that one array can take for a factor; empty if it would not expand."""
    factors, overflow, closed = projected
    have = factors.get(factor)
    if have is None or not _extends(axes, have):
        return ()
    if factor in closed and not have:
        return ()
    minor = form.simple[array] or any(dim[-1] == factor for dim in form.arrays[array])
    used = set(overflow)
    for f, atoms in factors.items():
        if f != factor:
            used.update(atoms)
    taken, room = 0, form.rule.sizes[factor]
    for k, atom in enumerate(axes):
        size = atom_sizes[atom]
        fits = k < len(have) or (factor not in closed and (minor or room % size == 0))
        if not fits or atom in reserved or atom in used:
            break
        room = room // size if room % size == 0 else 0
        taken += 1
    return axes[:taken] if taken > len(have) else ()


def _expansion(
    form: OpForm,
    array: int,
    expanded: Sequence[int],
    projected: FactorShardings,
    origins: Mapping[int, tuple[int, int]],
    now: ValueSharding,
    atom_sizes: Sequence[int],
) -> Expansion | None:
    """Returns the sharding of an array after some of its factors expanded; None if no dim can take them."""
    if projected.overflow:
        return None
    axes, came = list(now.axes), []
    for d, dim in enumerate(form.arrays[array]):
        if not any(f in expanded for f in dim):
            continue
        old, new = axes[d], _dim_axes(dim, projected.factors, form.rule.sizes, atom_sizes)
        if not _extends(new, old):
            continue
        axes[d] = new
        for atom in new[len(old) :]:
            came.append(Origin(d, atom, *origins[next(f for f in dim if atom in projected.factors[f])]))
    return Expansion(array, now._replace(axes=tuple(axes)), tuple(came)) if came else None


def _dim_axes(
    dim: Sequence[int], factors: Mapping[int, Atoms], sizes: Sequence[int], atom_sizes: Sequence[int]
) -> Atoms:
    axes: Atoms = ()
    for f in dim:
        axes += factors[f]
        if math.prod(atom_sizes[atom] for atom in factors[f]) < sizes[f]:
            break  # sharding a minor factor under a replicated major one would be a strided view
    return axes


def _extends(new: Atoms, old: Atoms) -> bool:
    return len(new) > len(old) and new[: len(old)] == old


def _limited_by_results(new: Atoms, factor: int, results: Sequence[FactorShardings]) -> Atoms:
    """Returns the axes of `new` that the results have too, so that none propagates between operands alone."""
    for factors, _, _ in results:
        have = factors.get(factor)
        if have is not None and _extends(new, have):
            new = have
    return new
