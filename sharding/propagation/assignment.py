"""The result of propagation: a spec for every value, a reason for every axis of every dim, and the conflicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, get_args

from ..graph import Annotation, DerivedFacts, Graph, Op, Site, Trips, line
from ..spec import Axis, Dim, Spec, divisible, indivisible, occupied
from .conflict_report import Conflict

Policy = Literal["storage", "shardy"]
"""Which annotation takes an axis that several claim: `"storage"`, the batch before what is stored (`storage.py`);
`"shardy"`, in Shardy's order."""
POLICIES: tuple[Policy, ...] = get_args(Policy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """One propagation step of an axis: from (value, dim) through an op."""

    word: str
    """`annotated`, or the name of the op."""
    origin: str = ""
    """Origin of the annotation; empty for an op."""
    site: Site = ()
    """Site of the op."""
    value: int | None = None
    """The value that the axis came from; None for an annotation."""
    dim: int | None = None
    array: str = ""
    """The op's array that the axis came from, unless it is the only operand: `operand 1`, `branch 0`, `its result`."""

    @staticmethod
    def of(op: Op, value: int, dim: int) -> Reason:
        """Returns the reason for an axis that came from a dim of `value` through an op."""
        return Reason(word=_word(op), site=op.site, value=value, dim=dim, array=_array(op, value))

    @property
    def source(self) -> str:
        """The origin of the annotation, or the user's line of the op."""
        return self.origin or line(self.site)


FindReason = Callable[[int, int, Axis], Reason]
"""(value, dim, axis) -> why the dim is sharded over the axis."""


class Reasons(Mapping[tuple[int, int, Axis], Reason]):
    """(value, dim, axis) -> why the dim is sharded over the axis, each computed on access."""

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


@dataclass(frozen=True, slots=True)
class Given:
    """What an assignment was propagated from."""

    annotations: Mapping[int, Annotation]
    policy: Policy
    platform: str = ""
    """The platform that reshards were then placed for; empty if none were."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Assignment(DerivedFacts):
    """A spec for every value of a graph; reasons and conflicts are computed on first access."""

    graph: Graph
    sizes: Mapping[str, int]
    specs: tuple[Spec, ...]
    find_reason: FindReason
    with_annotations: Callable[[Mapping[int, Annotation]], Assignment]
    """Propagates again with the given annotations added or replaced, reusing cached visits."""
    find_conflicts: Callable[[], tuple[Conflict, ...]] = tuple
    given: Given | None = None
    """What it was propagated from; None if another engine did."""
    searches: dict[str, Any] = field(default_factory=dict)
    """What was searched for its ops: how they run, and chains of reshards, by texts that are equal in all processes."""
    derived: dict[str, Any] = field(default_factory=dict, init=False, repr=False)
    """What `once` keeps: found out about the program as it is sharded here."""

    def with_trips(self, trips: Trips) -> Assignment:
        """The same with trip counts for loops of unknown length."""
        return replace(
            self,
            graph=self.graph.with_trips(trips),
            with_annotations=lambda annotations: self.with_annotations(annotations).with_trips(trips),
        )

    def boundary_spec(self, value: int) -> Spec:
        """The spec of an argument or result: `jax.jit` shards only dims that the axes divide."""
        return divisible(self.specs[value], self.graph.shapes[value], self.sizes)

    @cached_property
    def reasons(self) -> Reasons:
        """Why each dim of each value is sharded over each of its axes."""
        return Reasons(self.specs, self.find_reason)

    @cached_property
    def conflicts(self) -> tuple[Conflict, ...]:
        """The conflicts, in program order."""
        return self.find_conflicts()

    @cached_property
    def uneven(self) -> tuple[str, ...]:
        """Named values with dims that their axes do not divide, one line per dim."""
        graph = self.graph
        return tuple(
            f"{name}: {line}"
            for name, v in graph.names.items()
            for line in indivisible(self.specs[v], graph.shapes[v], self.sizes)
        )

    @cached_property
    def as_run(self) -> Assignment:
        """The same with specs that no annotation asks for limited: no device is left without elements.

        Arguments arrive sharded over axes that divide their dims. What is annotated is padded, inside the program. What
        an unrolled loop slices or stacks is replicated along the dim of its iterations: JAX slices and concatenates.
        """
        graph, sizes, inputs = self.graph, self.sizes, {*self.graph.inputs}

        known: dict[tuple[int, tuple[int, ...], bool], Spec] = {}

        def limited(spec: Spec, shape: tuple[int, ...], is_input: bool) -> Spec:
            key = id(spec), shape, is_input
            if key not in known:
                known[key] = divisible(spec, shape, sizes) if is_input else occupied(spec, shape, sizes)
            return known[key]

        pairs = enumerate(zip(self.specs, graph.shapes, strict=True))
        specs = [s if v in graph.annotations else limited(s, shape, v in inputs) for v, (s, shape) in pairs]
        for group in graph.groups:
            if len({specs[v].axes for v in group.members}) > 1:
                specs = [self.specs[v] if v in group.members else s for v, s in enumerate(specs)]
        for v in _unrolled_stacks(graph):
            if specs[v].axes[0]:
                specs[v] = Spec(dims=(Dim(), *specs[v].dims[1:]))
        specs = tuple(specs)
        return replace(self, specs=specs) if any(a is not b for a, b in zip(specs, self.specs, strict=True)) else self

    def chain(self, value: int, dim: int, axis: Axis) -> list[tuple[int, int, Reason]]:
        """Returns the steps by which an axis reached a dim, back to its annotation, as (value, dim, reason)."""
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
        """Returns why a dim is sharded over an axis or a sub-axis of it; None if it is not."""
        name = axis if isinstance(axis, str) else axis[0]
        same_axis = [a for a in self.specs[value].dims[dim].axes if name in (a, a[0])]
        found = (self.reasons.get((value, dim, a)) for a in (axis, *same_axis))
        return next((reason for reason in found if reason is not None), None)

    def origin(self, value: int, dim: int, axis: Axis) -> str:
        """Returns the origin of the annotation that an axis came from."""
        steps = self.chain(value, dim, axis)
        return steps[-1][2].source if steps else "unknown"


def _unrolled_stacks(graph: Graph) -> Iterator[int]:
    """The arrays that unrolled loops slice, and those that they stack."""
    for op in graph.ops:
        if op.name in ("scan xs", "scan ys") and op.site[0].params["unroll"] not in (1, False):
            yield op.operands[0] if op.name == "scan xs" else op.results[0]


def _word(op: Op) -> str:
    """Returns the name of an op; for an edge, that of its loop or branch, or `returned`."""
    if op.name != "edge":
        return op.name
    return op.site[0].primitive.name if op.site else "returned"


def _array(op: Op, value: int) -> str:
    if not op.site:
        return ""
    if value in op.results:
        return "its result" if len(op.results) == 1 else f"result {op.results.index(value)}"
    if len(op.operands) < 2 or value not in op.operands:
        return ""
    k = op.operands.index(value)
    if op.name != "edge":
        return f"operand {k}"
    return f"branch {k}" if op.site[0].primitive.name == "cond" else ("its initial value", "its body")[k]
