"""Why a dim is replicated: a closed annotation, a barrier, a lost conflict, or no annotation at all."""

from __future__ import annotations

from functools import cached_property

from ..propagation import Assignment
from ..spec import axis_name

UNREACHED = "not reached by any annotation"


class ReplicatedDims:
    """Explains the replicated dims of one assignment; lookups into the program are built once."""

    def __init__(self, assignment: Assignment):
        self.assignment, self.graph = assignment, assignment.graph

    def why(self, value: int, dim: int) -> str:
        """The reason as text."""
        return self._closed(value, dim) or self._barred(value, dim) or self._conflicts(value) or UNREACHED

    @cached_property
    def _members(self) -> dict[int, list[int]]:
        """Home -> the values that share its spec through a sharding group."""
        found: dict[int, list[int]] = {}
        for v in sorted({v for group in self.graph.groups for v in group.members}):
            found.setdefault(self.graph.representatives[v], []).append(v)
        return found

    @cached_property
    def _sources(self) -> dict[int, list[int]]:
        """Value -> the values that enter it at a loop, a branch or an output."""
        found: dict[int, set[int]] = {}
        for op in self.graph.ops:
            if op.name == "edge":
                for v in op.results:
                    found.setdefault(v, set()).update(op.operands)
        return {v: sorted(sources) for v, sources in found.items()}

    @cached_property
    def _barriers(self) -> dict[int, list[tuple[int, str]]]:
        """Value at a barrier -> the values on the other side, with the barrier's source line."""
        found: dict[int, list[tuple[int, str]]] = {}
        for op in self.graph.ops:
            if op.name == "barrier":
                ends = {*op.operands, *op.results}
                for v in ends:
                    found.setdefault(v, []).extend((other, op.source) for other in ends - {v})
        return found

    @cached_property
    def _rejected(self) -> dict[int, list[str]]:
        """Value whose sharding was kept in a conflict -> the claims that it rejected."""
        found: dict[int, list[str]] = {}
        for c in self.assignment.conflicts:
            found.setdefault(c.kept.value, []).append(f"{c.lost} was rejected: {c.rule}")
        return found

    def _closed(self, v: int, d: int) -> str:
        tied = self._members.get(self.graph.representatives[v], ()) if self._members else ()
        for member in (v, *(m for m in tied if m != v)):
            annotation = self.graph.annotations.get(member)
            if annotation is not None and not annotation.spec.dims[d].open:
                group = f" on {self.graph.label(member)}, in the same sharding group" if member != v else ""
                return f"closed by {annotation.origin_of(d)}{group}"
        return ""

    def _barred(self, v: int, d: int) -> str:
        """The barrier that stopped an axis from reaching a dim, if there is one."""
        for u in (v, *self._sources.get(v, ())) if self._barriers else ():
            for other, source in self._barriers.get(u, ()):
                axes = self.assignment.specs[other].dims[d].axes
                if axes:
                    return f"{', '.join(map(axis_name, axes))} stopped by the barrier at {source}"
        return ""

    def _conflicts(self, v: int) -> str:
        if not self._rejected:
            return ""
        return "; ".join([text for u in (v, *self._sources.get(v, ())) for text in self._rejected.get(u, ())][:2])
