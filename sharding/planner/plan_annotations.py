"""The few annotations from which propagation infers what a plan wants for every array.

The sharded arguments come first. Then, in program order, the first array that propagation shards otherwise is
annotated, with those of equal layers, until the program costs what the plan does; then those that change nothing are
left out again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from jax.sharding import PartitionSpec as P

from .. import paths
from ..explain.program_costs import Costs
from ..graph import Graph, Places, line
from ..graph.places import op_name
from ..propagation import Assignment
from ..propagation.added_annotation import named_annotations
from ..spec import Spec, to_partition_spec

MAX_ROUNDS = 12
"""Arrays inside the program, or equal ones of several layers, that are annotated."""
CLOSE = 1.01
"""The time, relative to the plan's, at which no more annotations are added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotated:
    """A completed program with the annotations that make it so."""

    annotations: Mapping[str, P]
    assignment: Assignment
    costs: Costs


@dataclass(slots=True)
class AnnotationSearch:
    """The search for annotations of one program on one mesh."""

    base: Assignment
    """The program as it is without a plan."""
    wanted: Sequence[Spec | None]
    """What the plan wants of each value; None where it wants nothing."""
    alike: Callable[[int], int]
    """Value -> a number that equal values of several layers have in common."""
    costed: Callable[[Assignment], Costs]
    places: Places = field(init=False)
    ends: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.places = Places(self.graph)
        self.ends = frozenset((*self.graph.inputs, *self.graph.outputs))

    @property
    def graph(self) -> Graph:
        return self.base.graph

    def run(self, goal_seconds: float, fits: Callable[[Costs], bool]) -> Annotated:
        """The cheapest program found that fits, with few annotations.

        Args:
            goal_seconds: the time of a program that is sharded as the plan wants.
            fits: whether a program's costs are within the limit; if none are, the smallest peak counts.
        """
        keys = dict(self.arguments(lambda v, wanted: any(wanted.axes)))
        best = now = self.completed(keys)
        tried: set[int] = set()
        for _ in range(MAX_ROUNDS):
            if now.costs.seconds <= CLOSE * goal_seconds and fits(now.costs):
                break
            more = self.next_annotations(now.assignment, tried)
            if not more:
                break
            now = self.completed({**now.annotations, **more})
            best = min(best, now, key=lambda one: _rank(one, fits))
        return self.pruned(best, fits)

    def completed(self, keys: Mapping[str, P]) -> Annotated:
        """The program with some annotations."""
        assignment = self.base.with_annotations(named_annotations(self.graph, keys, self.base.sizes, self.places))
        return Annotated(annotations=keys, assignment=assignment, costs=self.costed(assignment))

    def values(self, name: str) -> dict[str, int]:
        """The values that an annotation is of, by unique names."""
        return paths.find_all(self.graph.names, name, self.places)

    def arguments(self, is_wanted: Callable[[int, Spec], bool]) -> Iterator[tuple[str, P]]:
        """Names of arguments with what the plan wants, those of equal layers by one pattern where it has no other."""
        groups: defaultdict[tuple[str, Spec], list[str]] = defaultdict(list)
        for v in self.graph.inputs:
            name, wanted = self.graph.first_names.get(v), self.wanted[v]
            if name is not None and wanted is not None and v not in self.graph.annotations and is_wanted(v, wanted):
                groups[self.graph.layers.pattern(name), wanted].append(name)
        for (pattern, wanted), names in groups.items():
            spec = to_partition_spec(wanted)
            is_one = len(names) > 1 and sorted(paths.find_all(self.graph.names, pattern)) == sorted(names)
            yield from ((key, spec) for key in ([pattern] if is_one else names))

    def next_annotations(self, now: Assignment, tried: set[int]) -> dict[str, P]:
        """Annotations of the first array that is sharded otherwise than wanted, and of the equal ones."""
        by_group: defaultdict[int, list[int]] = defaultdict(list)
        for v in self.in_order():
            wanted = self.wanted[v]
            if wanted is not None and now.specs[v].axes != wanted.axes and v not in self.graph.annotations:
                by_group[self.alike(v)].append(v)
        for group, values in by_group.items():
            if group in tried:
                continue
            tried.add(group)
            first = values[0]
            if first in self.ends:
                differ = {v for v in values if v in self.ends}
                found = dict(self.arguments(lambda v, _, differ=differ: v in differ))
            else:
                found = self.inside([v for v in values if self.place(v) == self.place(first)])
            if found:
                return found
        return {}

    def in_order(self) -> Iterator[int]:
        yield from self.graph.inputs
        for op in self.graph.ops:
            yield from (v for v in op.results if v not in self.ends and not self.graph.manual.get(v))

    def place(self, v: int) -> str:
        """The line and op that compute a value; empty if unknown."""
        op = self.graph.makers.get(v)
        source = "" if op is None else line(op.site).partition(" ")[0]
        return f"{source}/{op_name(op)}" if op is not None and source else ""

    def inside(self, values: Sequence[int]) -> dict[str, P]:
        """Annotations of values that one line computes."""
        place = self.place(values[0])
        if not place:
            return {}
        names = self.places.find(place)
        spec = to_partition_spec(self.wanted[values[0]] or Spec(dims=()))
        if {*names.values()} == {*values}:
            return {place: spec}
        return {name: spec for name, v in names.items() if v in values}

    def pruned(self, best: Annotated, fits: Callable[[Costs], bool]) -> Annotated:
        """The same with fewer annotations, as long as it costs no more."""
        keys = dict(best.annotations)
        for key in list(keys):
            fewer = {name: spec for name, spec in keys.items() if name != key}
            found = self.base.with_annotations(named_annotations(self.graph, fewer, self.base.sizes, self.places))
            if all(a.axes == b.axes for a, b in zip(found.specs, best.assignment.specs, strict=True)):
                keys = fewer
        return best if len(keys) == len(best.annotations) else self.completed(keys)


def _rank(one: Annotated, fits: Callable[[Costs], bool]) -> tuple:
    return (0, one.costs.seconds) if fits(one.costs) else (1, one.costs.peak_bytes)
