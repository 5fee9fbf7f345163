"""How values are split, each way once and by number: the engine's state is one number per value."""

from __future__ import annotations

from typing import NamedTuple

from .atoms import Atoms


class Split(NamedTuple):
    """How a value is split at some moment of the pass."""

    axes: tuple[Atoms, ...]
    """Per dim its atoms."""
    closed: tuple[bool, ...]
    """Per dim whether it may not grow."""
    held: frozenset[int] = frozenset()
    """Atoms that no dim may take: promised to one of lower priority, or manual axes of a `shard_map`."""

    @property
    def is_split(self) -> bool:
        """Whether any dim has atoms."""
        return any(self.axes)


class Splits:
    """Every split that occurs, by number."""

    def __init__(self) -> None:
        self._numbers: dict[Split, int] = {}
        self._splits: list[Split] = []

    def __getitem__(self, number: int) -> Split:
        return self._splits[number]

    def number(self, split: Split) -> int:
        """The number of a split; equal ones have the same."""
        found = self._numbers.setdefault(split, len(self._splits))
        if found == len(self._splits):
            self._splits.append(split)
        return found
