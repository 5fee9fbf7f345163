"""One step of the pass: how the arrays of an op grow, given how they are split.

Within one op the step is Shardy's aggressive one: every factor takes the longest axes that its arrays agree on, and
conflicts between factors go to the larger source. What comes out depends on the op's form and on the splits alone, so
that it is worked out once for all ops of a deep model that meet in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..rules import Dims, Flow
from .atoms import Atoms
from .network import BACKWARD, BOTH, NONE, Form
from .splits import Split


class Origin(NamedTuple):
    """Where one atom of a dim came from: an array of the same op and a dim of it."""

    dim: int
    atom: int
    source: int
    source_dim: int


class Growth(NamedTuple):
    """One array of an op that takes more atoms."""

    array: int
    split: Split
    origins: tuple[Origin, ...]


class Parts(NamedTuple):
    """One array's split by factor."""

    factors: dict[int, Atoms]
    overflow: frozenset[int]
    """Atoms that fit no factor."""
    shut: set[int]
    """Factors closed to growth."""


def growths(form: Form, level: int, splits: Sequence[Split], atom_sizes: Sequence[int]) -> tuple[Growth, ...]:
    """What one visit of an op at a level changes.

    Args:
        form: the op's.
        level: the op priority, which says what may flow which way.
        splits: how each array is split now, operands before results.
        atom_sizes: the size of each atom.
    """
    rule, n, directions = form.rule, form.num_operands, form.directions[level]
    parts = [project(form, a, split, atom_sizes) for a, split in enumerate(splits)]
    wanted: dict[int, Atoms] = {}
    for factor in sorted({f for part in parts for f, atoms in part.factors.items() if atoms}):
        axes = _agreed(parts, factor, n, directions[factor])
        if axes:
            wanted[factor] = axes
    if not any(_extends(axes, part.factors.get(f, axes)) for f, axes in wanted.items() for part in parts):
        return ()
    order, sources = _order(wanted, parts, rule.sizes, atom_sizes if rule.flow is Flow.ELEMENTWISE else None)
    grown: dict[int, list[int]] = {}
    for a in (*range(n, len(splits)), *range(n)):
        for factor in order:
            new = _fitting(wanted[factor], factor, form, a, parts[a], splits[a].held, atom_sizes)
            if new and a < n and rule.flow is Flow.ELEMENTWISE:
                new = _no_further_than(new, factor, parts[n:])
            if new and _extends(new, parts[a].factors[factor]):
                parts[a].factors[factor] = new
                grown.setdefault(a, []).append(factor)
    origins = {f: (a, dim_of(f, form.arrays[a])) for f, a in sources.items()}
    now = dict(enumerate(splits))  # by the first array of each value: one value may be two of the arrays
    found = []
    for a in sorted(grown):
        first = form.firsts[a]
        growth = _growth(form, a, grown[a], parts[a], origins, now[first], atom_sizes)
        if growth is not None:
            now[first] = growth.split
            found.append(growth)
    return tuple(found)


def project(form: Form, array: int, split: Split, atom_sizes: Sequence[int]) -> Parts:
    """An array's split by factor."""
    axes, closed = split.axes, split.closed
    if form.simple[array]:
        dims = [dim[0] for dim in form.arrays[array]]
        shut = {f for f, c in zip(dims, closed, strict=True) if c}
        return Parts(dict(zip(dims, axes, strict=True)), frozenset(), shut)
    factors: dict[int, Atoms] = {}
    overflow: set[int] = set()
    shut: set[int] = set()
    for d, dim in enumerate(form.arrays[array]):
        rest, over = axes[d], False
        for k, f in enumerate(dim):
            if closed[d] or over:
                shut.add(f)
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
                shut.add(f)
                over, rest = True, ()
    return Parts(factors, frozenset(overflow), shut)


def dim_of(factor: int, dims: Dims) -> int:
    """The dim of an array that has a factor."""
    return next(d for d, dim in enumerate(dims) if factor in dim)


def _agreed(parts: Sequence[Parts], factor: int, num_operands: int, direction: int) -> Atoms:
    """The longest axes of a factor that its arrays agree on, major first."""
    if direction == NONE:
        return ()
    groups = (parts[:num_operands], parts[num_operands:])
    axes: Atoms = ()
    grow = True
    for second, group in enumerate(groups if direction != BACKWARD else reversed(groups)):
        grow = grow and not (second and direction != BOTH)
        for factors, _, _ in group:
            new = factors.get(factor)
            if new is None or new == axes:
                continue
            k = min(len(axes), len(new))
            if axes[:k] != new[:k]:
                k = next(i for i in range(k) if axes[i] != new[i])
                axes, grow = axes[:k], False
            elif len(new) > k and grow:
                axes = new
    return axes


def _order(
    wanted: Mapping[int, Atoms], parts: Sequence[Parts], sizes: Sequence[int], atom_sizes: Sequence[int] | None
) -> tuple[list[int], dict[int, int]]:
    """Factors in the order in which they may claim axes, and the array that each one's axes come from.

    Larger source first; for elementwise ops (those with `atom_sizes`) the more split factor; then the earlier array
    and factor.
    """
    totals = [math.prod(sizes[f] for f in factors) for factors, _, _ in parts]
    sources, keys = {}, {}
    for f, axes in wanted.items():
        holders = [a for a, (factors, _, _) in enumerate(parts) if factors.get(f, ())[: len(axes)] == axes]
        sources[f] = max(holders, key=lambda a: (totals[a], -a))
        width = math.prod(atom_sizes[atom] for atom in axes) if atom_sizes is not None else 1
        keys[f] = (-totals[sources[f]], -width, sources[f], f)
    return sorted(wanted, key=keys.__getitem__), sources


def _fitting(
    axes: Atoms,
    factor: int,
    form: Form,
    array: int,
    part: Parts,
    held: frozenset[int],
    atom_sizes: Sequence[int],
) -> Atoms:
    """The head of `axes` that one array can take for a factor; empty if it wouldn't grow."""
    factors, overflow, shut = part
    have = factors.get(factor)
    if have is None or not _extends(axes, have):
        return ()
    if factor in shut and not have:
        return ()
    minor = form.simple[array] or any(dim[-1] == factor for dim in form.arrays[array])
    used = set(overflow)
    for f, atoms in factors.items():
        if f != factor:
            used.update(atoms)
    taken, room = 0, form.rule.sizes[factor]
    for k, atom in enumerate(axes):
        size = atom_sizes[atom]
        fits = k < len(have) or (factor not in shut and (minor or room % size == 0))
        if not fits or atom in held or atom in used:
            break
        room = room // size if room % size == 0 else 0
        taken += 1
    return axes[:taken] if taken > len(have) else ()


def _growth(
    form: Form,
    array: int,
    factors: Sequence[int],
    part: Parts,
    origins: Mapping[int, tuple[int, int]],
    now: Split,
    atom_sizes: Sequence[int],
) -> Growth | None:
    """What an array becomes whose factors have grown; None if no dim can take it."""
    if part.overflow:
        return None
    axes, came = list(now.axes), []
    for d, dim in enumerate(form.arrays[array]):
        if not any(f in factors for f in dim):
            continue
        old, new = axes[d], _dim_axes(dim, part.factors, form.rule.sizes, atom_sizes)
        if not _extends(new, old):
            continue
        axes[d] = new
        for atom in new[len(old) :]:
            came.append(Origin(d, atom, *origins[next(f for f in dim if atom in part.factors[f])]))
    return Growth(array, now._replace(axes=tuple(axes)), tuple(came)) if came else None


def _dim_axes(
    dim: Sequence[int], factors: Mapping[int, Atoms], sizes: Sequence[int], atom_sizes: Sequence[int]
) -> Atoms:
    axes: Atoms = ()
    for f in dim:
        axes += factors[f]
        if math.prod(atom_sizes[atom] for atom in factors[f]) < sizes[f]:
            break  # a minor factor split under a whole major one would be a strided view
    return axes


def _extends(new: Atoms, old: Atoms) -> bool:
    return len(new) > len(old) and new[: len(old)] == old


def _no_further_than(new: Atoms, factor: int, results: Sequence[Parts]) -> Atoms:
    """Keeps a split from going sideways between operands where the result can't take it."""
    for factors, _, _ in results:
        have = factors.get(factor)
        if have is not None and _extends(new, have):
            new = have
    return new
