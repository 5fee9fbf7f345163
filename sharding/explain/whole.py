"""Why a dim is whole: what closes it, what stops the axes on their way, or what they lost against."""

from __future__ import annotations

from functools import cached_property

from ..propagation import Assignment
from ..spec import axis_name

UNREACHED = "no annotation reaches it"


class Wholes:
    """Why dims that no axis splits are whole; what the answers need of the program is looked up once."""

    def __init__(self, assignment: Assignment):
        self.assignment, self.graph = assignment, assignment.graph

    def why(self, value: int, dim: int) -> str:
        """The reason in words."""
        return self._closed(value, dim) or self._stopped(value, dim) or self._lost(value) or UNREACHED

    @cached_property
    def _members(self) -> dict[int, list[int]]:
        """Home -> the values that share its spec, of groups."""
        found: dict[int, list[int]] = {}
        for v in sorted({v for group in self.graph.groups for v in group.members}):
            found.setdefault(self.graph.homes[v], []).append(v)
        return found

    @cached_property
    def _sources(self) -> dict[int, list[int]]:
        """Value -> what edges of loops, branches and results bring to it."""
        found: dict[int, set[int]] = {}
        for op in self.graph.ops:
            if op.name == "edge":
                for v in op.results:
                    found.setdefault(v, set()).update(op.operands)
        return {v: sorted(sources) for v, sources in found.items()}

    @cached_property
    def _barriers(self) -> dict[int, list[tuple[int, str]]]:
        """Value at a barrier -> the values beyond it, with the barrier's line."""
        found: dict[int, list[tuple[int, str]]] = {}
        for op in self.graph.ops:
            if op.name == "barrier":
                ends = {*op.operands, *op.results}
                for v in ends:
                    found.setdefault(v, []).extend((other, op.source) for other in ends - {v})
        return found

    @cached_property
    def _refused(self) -> dict[int, list[str]]:
        """Value that stayed as it is in a conflict -> what it refused."""
        found: dict[int, list[str]] = {}
        for c in self.assignment.conflicts:
            found.setdefault(c.kept.value, []).append(f"{c.lost} was refused: {c.rule}")
        return found

    def _closed(self, v: int, d: int) -> str:
        tied = self._members.get(self.graph.homes[v], ()) if self._members else ()
        for member in (v, *(m for m in tied if m != v)):
            pin = self.graph.pins.get(member)
            if pin is not None and not pin.spec.dims[d].open:
                group = f" for {self.graph.label(member)}, of the same group" if member != v else ""
                return f"{pin.said(d)} closes it{group}"
        return ""

    def _stopped(self, v: int, d: int) -> str:
        """The barrier that kept a dim whole, if one did."""
        for u in (v, *self._sources.get(v, ())) if self._barriers else ():
            for other, source in self._barriers.get(u, ()):
                axes = self.assignment.specs[other].dims[d].axes
                if axes:
                    return f"the barrier at {source} stops {', '.join(map(axis_name, axes))}"
        return ""

    def _lost(self, v: int) -> str:
        if not self._refused:
            return ""
        return "; ".join([text for u in (v, *self._sources.get(v, ())) for text in self._refused.get(u, ())][:2])
