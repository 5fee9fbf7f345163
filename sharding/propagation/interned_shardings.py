"""Interned shardings: each distinct sharding once, by number, so that the engine's state is one number per value."""

from __future__ import annotations

from typing import NamedTuple

from .axis_atoms import Atoms


class ValueSharding(NamedTuple):
    """The sharding of a value during propagation."""

    axes: tuple[Atoms, ...]
    """The atoms of each dim."""
    closed: tuple[bool, ...]
    """Whether each dim is closed to further axes."""
    reserved: frozenset[int] = frozenset()
    """Atoms that no dim may take: those of a lower-priority annotation, or manual axes of a `shard_map`."""

    @property
    def is_sharded(self) -> bool:
        """Whether any dim has atoms."""
        return any(self.axes)


class ShardingTable:
    """All shardings that occur, by number."""

    def __init__(self) -> None:
        self._numbers: dict[ValueSharding, int] = {}
        self._shardings: list[ValueSharding] = []

    def __getitem__(self, number: int) -> ValueSharding:
        return self._shardings[number]

    def number(self, sharding: ValueSharding) -> int:
        """Returns the number of a sharding; equal shardings have the same."""
        found = self._numbers.setdefault(sharding, len(self._shardings))
        if found == len(self._shardings):
            self._shardings.append(sharding)
        return found
