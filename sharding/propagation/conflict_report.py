"""What is reported of a conflict: two claims, the one that was kept, and the bytes that this costs."""

from __future__ import annotations

from dataclasses import dataclass

from ..spec import Axis, axis_name

NO_ANNOTATION = "no annotation"
"""The origin of a claim that no annotation makes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One side of a conflict: a dim, the axes it is sharded over, and the annotation they came from."""

    name: str
    """The value's name, or its type if it has none."""
    value: int
    dim: int
    axes: tuple[Axis, ...]
    origin: str

    def __str__(self) -> str:
        return f"{self.name} dim {self.dim}: ({','.join(map(axis_name, self.axes)) or 'replicated'}) from {self.origin}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """Two incompatible claims at one op; `kept` wins, so the op's data must be resharded."""

    op: str
    source: str
    """The user's line of the op."""
    kept: Claim
    lost: Claim
    rule: str
    """Why the kept claim won."""
    bytes_lost: int
    """Extra bytes that each device holds, or has to gather, because the other claim was rejected."""

    @property
    def cure(self) -> str:
        """The annotations that can be changed so that both sides agree, or so that the other side wins."""
        if self.kept.value == self.lost.value and self.kept.dim == self.lost.dim:
            return f"remove one of two annotations: {self.kept.origin}, or {self.lost.origin}"
        shared = [a for a in self.lost.axes if a in self.kept.axes]
        if shared:
            axes = ", ".join(map(axis_name, shared))
            sides = (f"dim {c.dim} of {c.name} ({c.origin})" for c in (self.kept, self.lost))
            return f"keep {axes} on one of " + " and ".join(sides) + self._priority()
        if not self.kept.axes and self.kept.origin == NO_ANNOTATION:
            axes = ", ".join(map(axis_name, self.lost.axes))
            return f"annotate {self.kept.name} with ({axes}) on dim {self.kept.dim}"
        if not self.kept.axes:
            return f"leave dim {self.kept.dim} of {self.kept.name} open with P.UNCONSTRAINED ({self.kept.origin})"
        kept, lost = (f"({', '.join(map(axis_name, c.axes)) or 'nothing'})" for c in (self.kept, self.lost))
        one, other = self.kept, self.lost
        return (
            f"shard dim {other.dim} of {other.name} over {kept} too ({other.origin}), "
            f"or dim {one.dim} of {one.name} over {lost} ({one.origin}){self._priority()}"
        )

    def _priority(self) -> str:
        """How one of two annotations can wait for the other."""
        return "" if NO_ANNOTATION in (self.kept.origin, self.lost.origin) else ", or let one of them wait (priority 1)"

    def __str__(self) -> str:
        where = f"{self.op} at {self.source}" if self.source else self.op
        return f"{where}: kept {self.kept}, rejected {self.lost}: {self.rule} ({self.bytes_lost} bytes)"
