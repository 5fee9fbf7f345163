"""Atoms of mesh axes: sub-axes of prime size, which turn axis arithmetic into tuple arithmetic.

An axis of size 8 is three atoms of size 2, major to minor. A dim's sharding is a tuple of atoms; one extends another if
it starts with it; sub-axes need no special case. Axes of size 1 have no atoms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..spec import Axis, MeshSizes

Atoms = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AtomTable:
    """The atoms of a mesh: `sizes[i]` is the size of atom i, `positions[i]` its axis and pre-size in it."""

    mesh_sizes: Mapping[str, int]
    sizes: tuple[int, ...]
    positions: tuple[tuple[str, int], ...]
    of_axis: Mapping[str, Atoms]

    @staticmethod
    def of(mesh_sizes: Mapping[str, int]) -> AtomTable:
        """Returns the atoms of a mesh, axis by axis."""
        sizes: list[int] = []
        positions: list[tuple[str, int]] = []
        of_axis: dict[str, Atoms] = {}
        for name, size in mesh_sizes.items():
            start, pre = len(sizes), 1
            for p in _primes(size):
                sizes.append(p)
                positions.append((name, pre))
                pre *= p
            of_axis[name] = tuple(range(start, len(sizes)))
        return AtomTable(MeshSizes(mesh_sizes), tuple(sizes), tuple(positions), of_axis)

    def atoms_of(self, axes: Sequence[Axis]) -> Atoms:
        """Returns the atoms of axes and sub-axes."""
        atoms: list[int] = []
        for axis in axes:
            if isinstance(axis, str):
                atoms += self.of_axis[axis]
            else:
                name, pre, size = axis
                atoms += [a for a in self.of_axis[name] if pre <= self.positions[a][1] < pre * size]
        return tuple(atoms)

    def axes_of(self, atoms: Atoms) -> tuple[Axis, ...]:
        """Returns the axes and sub-axes that atoms make up."""
        axes: list[Axis] = []
        i = 0
        while i < len(atoms):
            name, pre = self.positions[atoms[i]]
            j, size = i, 1
            while j < len(atoms) and self.positions[atoms[j]] == (name, pre * size):
                size *= self.sizes[atoms[j]]
                j += 1
            axes.append(name if size == self.mesh_sizes[name] else (name, pre, size))
            i = j
        return tuple(axes)


def _primes(n: int) -> list[int]:
    primes, p = [], 2
    while n > 1:
        while n % p == 0:
            primes.append(p)
            n //= p
        p += 1
    return primes
