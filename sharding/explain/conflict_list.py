"""`Conflicts`: all conflicts of a program; those of equal layers are shown once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..display import Column, Table, Tabular
from ..paths import Layers
from ..propagation import Conflict

COLUMNS = (
    Column("op", "code"),
    Column("line", "code"),
    Column("kept"),
    Column("rejected"),
    Column("rule"),
    Column("count", "number"),
    Column("bytes lost", "bytes"),
    Column("cure"),
)


class EqualConflicts(NamedTuple):
    """Conflicts that differ only in the layer."""

    text: str
    """The first one, with `*` for its layer if there are several."""
    cure: str
    members: tuple[Conflict, ...]
    bytes_lost: int
    """Of all of them."""

    @property
    def first(self) -> Conflict:
        """The first one in program order."""
        return self.members[0]

    @property
    def num(self) -> int:
        """How many there are."""
        return len(self.members)


class Conflicts(tuple[Conflict, ...], Tabular):
    """All conflicts in program order; prints those of equal layers once, most bytes first, each with its cure."""

    layers: Layers

    def __new__(cls, conflicts: Iterable[Conflict] = (), layers: Layers | None = None) -> Conflicts:
        found = super().__new__(cls, conflicts)
        found.layers = layers or Layers()
        return found

    def grouped(self) -> list[EqualConflicts]:
        """Those of equal layers together, most bytes first."""
        groups: dict[str, list[Conflict]] = {}
        for conflict in self:
            groups.setdefault(self.layers.pattern(str(conflict)), []).append(conflict)
        found = [
            EqualConflicts(
                str(own[0]) if len(own) == 1 else text,
                own[0].cure if len(own) == 1 else self.layers.pattern(own[0].cure),
                tuple(own),
                sum(c.bytes_lost for c in own),
            )
            for text, own in groups.items()
        ]
        return sorted(found, key=lambda one: -one.bytes_lost)

    def tables(self) -> list[Table]:
        """One table, with a row for equal layers."""
        rows = []
        for one in self.grouped():
            c, many = one.first, one.num > 1
            kept, lost = (self.layers.pattern(str(x)) if many else str(x) for x in (c.kept, c.lost))
            rows.append((c.op, c.source, kept, lost, c.rule, one.num, one.bytes_lost, one.cure))
        return [Table(f"{len(self)} conflicts" if len(self) != 1 else "1 conflict", COLUMNS, rows)]

    def __str__(self) -> str:
        found = ((one, f" (x{one.num})" if one.num > 1 else "") for one in self.grouped())
        return "\n".join(f"{one.text}{times}\n  cure: {one.cure}" for one, times in found)

    __repr__ = __str__
