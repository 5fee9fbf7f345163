"""How a collective could be avoided: which annotation would have to give way, and what it would have to say.

An axis that has to move came from an annotation, some ops away; so did the axis, or the dim said to be whole, that it
can't be at peace with. Both are named with their lines, so that one of the two can be changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..decision import PRODUCT, Decision
from ..graph import Op
from ..propagation import Assignment
from ..rules import Kind
from ..spec import Axis, Spec, axis_name


class Advice:
    """Hints for the collectives of one program."""

    def __init__(self, assignment: Assignment):
        self.assignment, self.graph, self.specs = assignment, assignment.graph, assignment.specs
        self._origins: dict[tuple[int, int, Axis], str] = {}

    def operand(self, op: Op, v: int, want: Spec) -> str:
        """What would spare moving an operand to the spec under which the op takes it."""
        have = self.specs[v]
        left, came = _minus(have, want), _minus(want, have)
        hint = f"annotate {self.who(v)} as {want}" + self.as_is(v, have, left)
        rival = self.rival(op, v, [a for _, a in (*left, *came)], self.origins(v, left))
        if rival:
            return f"{hint}, or {rival}"
        return f"{hint}; {op.name} has dim {left[0][0]} of it whole" if left else hint

    def rival(self, op: Op, v: int, axes: Sequence[Axis], own: Sequence[str]) -> str:
        """What has one of the axes by another annotation, so that an op can't have a value as it is."""
        for u in (*op.operands, *op.results):
            for d, mine in enumerate(self.specs[u].axes if u != v else ()):
                found = [a for a in mine if a in axes and self.origin(u, d, a) not in own]
                if found:
                    return f"take {_names(found)} off dim {d} of {self.who(u)}" + self.by(u, [(d, found[0])])
        return ""

    def result(self, v: int, have: Spec) -> str:
        """What would spare moving a result, as an op makes it, to where it was decided to lie."""
        want = self.specs[v]
        return f"annotate {self.who(v)} as {have}" + self.as_is(v, want, _minus(want, have))

    def edge(self, v: int, target: int) -> str:
        """What would spare moving a value to where a loop, a branch or the program has it."""
        have, want = self.specs[v], self.specs[target]
        there = f"annotate {self.who(target)} as {have}" + self.as_is(target, want, _minus(want, have))
        return f"{there}, or {self.who(v)} as {want}" + self.as_is(v, have, _minus(have, want))

    def sum(self, op: Op, decision: Decision, axes: Sequence[Axis]) -> str:
        """What would spare adding up the parts of a result that the devices along some axes make."""
        assert op.rule is not None
        found = ""
        for v, need, dims in zip(op.operands, decision.needs, op.rule.operands, strict=True):
            for d, factors in enumerate(dims):
                mine = [a for a in axes if a in need.axes[d] and a in self.specs[v].axes[d]]
                if mine and any(op.rule.kinds[f] is Kind.REDUCE for f in factors):
                    found = found or f"take {_names(mine)} off dim {d} of {self.who(v)}" + self.by(v, [(d, mine[0])])
        if found and op.name == PRODUCT:
            return f"{found}; or split the result by {_names(axes)}: a sum that is scattered moves half"
        return found

    def as_is(self, v: int, spec: Spec, at: Sequence[tuple[int, Axis]]) -> str:
        """How a value is split, and who says so of those of its dims that matter."""
        said = self.origins(v, at) if at else self.closed(v)
        return f" (it is {spec}" + (f" by {', '.join(said)})" if said else ")")

    def by(self, v: int, at: Sequence[tuple[int, Axis]]) -> str:
        """Who split a value so, in brackets."""
        said = self.origins(v, at)
        return f" ({', '.join(said)})" if said else ""

    def origins(self, v: int, at: Iterable[tuple[int, Axis]]) -> list[str]:
        """The annotations that axes on dims of a value came from, each once."""
        found = (self.origin(v, d, a) for d, a in at)
        return list(dict.fromkeys(one for one in found if one))

    def origin(self, v: int, d: int, axis: Axis) -> str:
        """The annotation that an axis came from; empty if unknown."""
        key = (v, d, axis)
        if key not in self._origins:
            steps = self.assignment.chain(v, d, axis)
            came = steps[-1][2].source if steps and steps[-1][2].value is None else ""
            self._origins |= {(u, e, axis): came for u, e, _ in steps} | {key: came}
        return self._origins[key]

    def closed(self, v: int) -> list[str]:
        """The annotation of a value, if it keeps a dim whole."""
        pins = [pin for u in self.graph.members(v) if (pin := self.graph.pins.get(u)) is not None]
        return [pin.origin for pin in pins if any(not dim.open for dim in pin.spec.dims)][:1]

    def who(self, v: int) -> str:
        """A value by its name; by its type and what makes it, if it has none."""
        name, op = self.graph.first_names.get(v), self.graph.makers.get(v)
        if name or op is None or op.name == "edge" or not op.source:
            return self.graph.label(v)
        return f"{self.graph.label(v)} of {op.name} at {op.source}"


def _minus(a: Spec, b: Spec) -> list[tuple[int, Axis]]:
    """(dim, axis) of what splits a dim in one spec and not in the other."""
    return [(d, axis) for d, axes in enumerate(a.axes) for axis in axes if axis not in b.axes[d]]


def _names(axes: Iterable[Axis]) -> str:
    return ", ".join(map(axis_name, axes))
