"""What the pass decided: a spec for every value, a reason for every axis of every dim, the conflicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..graph import Graph, Op, Pin, Site, line
from ..spec import Axis, Spec, axis_name, indivisible


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """One step of the way that an axis came: from (value, dim) through an op."""

    word: str
    """`annotated`, or the name of the op."""
    origin: str = ""
    """Who annotated; empty for an op."""
    site: Site = ()
    """Where the op comes from."""
    value: int | None = None
    """The value that brought the axis; None for an annotation."""
    dim: int | None = None
    array: str = ""
    """Which array of the op brought it, where that is not its only operand: `operand 1`, `its result`."""

    @staticmethod
    def of(op: Op, value: int, dim: int) -> Reason:
        """An op as a reason, and its array that brought the axis."""
        return Reason(word=_word(op), site=op.site, value=value, dim=dim, array=_array(op, value))

    @property
    def source(self) -> str:
        """The annotation's origin, or the user's line of the op."""
        return self.origin or line(self.site)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One side of a conflict: a value's dim, the axes it is split by there, and the annotation they came from."""

    name: str
    """The value's name; of one that has none its type."""
    value: int
    dim: int
    axes: tuple[Axis, ...]
    origin: str

    def __str__(self) -> str:
        return f"{self.name} dim {self.dim}: ({','.join(map(axis_name, self.axes)) or 'whole'}) from {self.origin}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """Two claims that one op can't have both; the value `kept.value` stays as it is and data has to move."""

    op: str
    source: str
    """The user's line of the op."""
    kept: Claim
    lost: Claim
    rule: str
    """By which rule the kept claim won."""
    bytes_lost: int
    """How many bytes more each device holds, or has to gather, because the lost claim is not met."""

    def __str__(self) -> str:
        where = f"{self.op} at {self.source}" if self.source else self.op
        return f"{where}: {self.kept} stays, {self.lost} is lost: {self.rule} ({self.bytes_lost} bytes)"


FindReason = Callable[[int, int, Axis], Reason]
"""(value, dim, axis that it is split by) -> why."""


class Reasons(Mapping[tuple[int, int, Axis], Reason]):
    """(value, dim, axis) -> why the dim is split by it, each worked out when it is asked for."""

    def __init__(self, specs: Sequence[Spec], find: FindReason):
        self._specs, self._find = specs, find

    def __getitem__(self, key: tuple[int, int, Axis]) -> Reason:
        value, dim, axis = key
        if axis not in self._specs[value].dims[dim].axes:
            raise KeyError(key)
        return self._find(value, dim, axis)

    def __iter__(self) -> Iterator[tuple[int, int, Axis]]:
        for value, spec in enumerate(self._specs):
            for dim, axes in enumerate(spec.axes):
                yield from ((value, dim, axis) for axis in axes)

    def __len__(self) -> int:
        return sum(1 for _ in self)


@dataclass(frozen=True, kw_only=True, eq=False)
class Assignment:
    """A spec per value of a graph; reasons and conflicts are worked out when they are first asked for."""

    graph: Graph
    sizes: Mapping[str, int]
    specs: tuple[Spec, ...]
    find_reason: FindReason
    with_pins: Callable[[Mapping[int, Pin]], Assignment]
    """What comes of other annotations on some values; what does not depend on them is not worked out again."""
    find_conflicts: Callable[[], tuple[Conflict, ...]] = tuple

    @cached_property
    def reasons(self) -> Reasons:
        """Why each dim of each value is split as it is."""
        return Reasons(self.specs, self.find_reason)

    @cached_property
    def conflicts(self) -> tuple[Conflict, ...]:
        """Where two claims met that one op can't have both, in program order."""
        return self.find_conflicts()

    @cached_property
    def uneven(self) -> tuple[str, ...]:
        """Named values whose split doesn't divide them, a line for each dim."""
        graph = self.graph
        return tuple(
            f"{name}: {line}"
            for name, v in graph.names.items()
            for line in indivisible(self.specs[v], graph.shapes[v], self.sizes)
        )

    def chain(self, value: int, dim: int, axis: Axis) -> list[tuple[int, int, Reason]]:
        """The steps by which an axis reached a dim, back to the annotation: (value, dim, reason) each."""
        steps: list[tuple[int, int, Reason]] = []
        seen: set[tuple[int, int]] = set()
        at: tuple[int | None, int | None] = (value, dim)
        while at[0] is not None and at[1] is not None and (at[0], at[1]) not in seen:
            seen.add((at[0], at[1]))
            reason = self.reason(at[0], at[1], axis)
            if reason is None:
                break
            steps.append((at[0], at[1], reason))
            at = (reason.value, reason.dim)
        return steps

    def reason(self, value: int, dim: int, axis: Axis) -> Reason | None:
        """Why a dim is split by an axis (the whole or a part of it); None if it is not."""
        name = axis if isinstance(axis, str) else axis[0]
        alike = [a for a in self.specs[value].dims[dim].axes if name in (a, a[0])]
        found = (self.reasons.get((value, dim, a)) for a in (axis, *alike))
        return next((reason for reason in found if reason is not None), None)

    def origin(self, value: int, dim: int, axis: Axis) -> str:
        """The annotation that an axis came from."""
        steps = self.chain(value, dim, axis)
        return steps[-1][2].source if steps else "unknown"


def _word(op: Op) -> str:
    """The name of an op; of an edge the loop or branch whose value it ties, if not a result of the program."""
    if op.name != "edge":
        return op.name
    return op.site[0].primitive.name if op.site else "returned"


def _array(op: Op, value: int) -> str:
    if not op.site:
        return ""
    if value in op.results:
        return "its result" if len(op.results) == 1 else f"result {op.results.index(value)}"
    return f"operand {op.operands.index(value)}" if len(op.operands) > 1 and value in op.operands else ""
