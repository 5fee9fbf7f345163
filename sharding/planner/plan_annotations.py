"""The few annotations from which propagation infers what a plan wants for every array.

The sharded arguments come first, then each array that propagation shards otherwise, with those of equal layers, until
the program costs what the plan does. Then the annotations that change nothing, or save nothing, are left out again.
"""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from jax.sharding import PartitionSpec as P

from .. import paths
from ..explain.program_costs import Costs, ProgramCosts, lost_bytes
from ..graph import Annotation, Graph, Places
from ..propagation import Assignment
from ..propagation.added_annotation import named_annotations
from ..spec import Axis, Spec, to_partition_spec

Fits = Callable[[Costs | ProgramCosts], bool]
"""Whether costs are within the memory limit."""
MAX_ROUNDS = 5
"""How often arrays are annotated that propagation still shards otherwise."""
BYTES_EXPONENT = 0.2
"""Of the bytes on the wire and in memory, together, in a plan's score: twice as many count as 15 % more time."""
CLOSE = 1.005
"""The time, relative to the plan's or to that with more annotations, at which no more are added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotated:
    """A completed program with the annotations that make it so."""

    annotations: Mapping[str, P]
    assignment: Assignment
    costs: ProgramCosts
    """Of one that is sharded like this."""

    def all_costs(self) -> Costs:
        """All costs; the conflicts are those of these annotations."""
        return dataclasses.replace(self.costs.all(), lost_bytes=lost_bytes(self.assignment))


@dataclass(slots=True)
class AnnotationSearch:
    """The search for annotations of one program on one mesh."""

    base: Assignment
    """The program as it is without a plan."""
    wanted: Sequence[Spec | None]
    """What the plan wants of each value; None where it wants nothing."""
    alike: Callable[[int], int]
    """Value -> a number that equal values of several layers have in common."""
    costed: Callable[[Assignment], ProgramCosts]
    kept: Mapping[str, P] = field(default_factory=dict)
    """Annotations that stay."""
    places: Places = field(init=False)
    ends: frozenset[int] = field(init=False)
    known: dict[tuple[str, P], dict[int, Annotation]] = field(default_factory=dict)
    """The annotations of each name and spec so far."""
    found: dict[str, dict[str, int]] = field(default_factory=dict)
    """The values of each name so far."""
    costs: dict[tuple, ProgramCosts] = field(default_factory=dict)
    """Of each way in which the values were sharded so far."""

    def __post_init__(self) -> None:
        self.places = Places(self.graph)
        self.ends = frozenset((*self.graph.inputs, *self.graph.outputs))

    @property
    def graph(self) -> Graph:
        return self.base.graph

    def run(self, goal_seconds: float, fits: Fits, deadline: float) -> Annotated:
        """The cheapest program found that fits, with few annotations.

        Args:
            goal_seconds: the time of a program that is sharded as the plan wants.
            fits: whether a program's costs are within the limit; if none are, the smallest peak counts.
            deadline: of `time.monotonic`, after which annotations that save nothing stay.
        """
        best = self.extended(dict(self.arguments(lambda v, wanted: any(wanted.axes))), goal_seconds, fits)
        return self.without_useless(self.without_idle(best), fits, deadline)

    def extended(self, keys: Mapping[str, P], goal_seconds: float, fits: Fits) -> Annotated:
        """The cheapest program found with some annotations and what is missing for it to be as the plan wants."""
        best = now = self.completed(keys)
        for _ in range(MAX_ROUNDS):
            if is_close(now.costs, goal_seconds) and fits(now.costs):
                break
            more = {k: spec for k, spec in self.missing(now.assignment).items() if k not in now.annotations}
            if not more:
                break
            now = self.completed({**now.annotations, **more})
            best = min(best, now, key=lambda one: rank(one.costs, fits))
        return best

    def completed(self, keys: Mapping[str, P]) -> Annotated:
        """The program with some annotations, and those that stay."""
        keys = {name: spec for name, spec in keys.items() if name not in self.kept} | dict(self.kept)
        assignment = self.with_annotations(keys)
        shardings = _shardings(assignment)
        if shardings not in self.costs:
            self.costs[shardings] = self.costed(assignment)
        return Annotated(annotations=keys, assignment=assignment, costs=self.costs[shardings])

    def with_annotations(self, keys: Mapping[str, P]) -> Assignment:
        found: dict[int, Annotation] = {}
        for key in keys.items():
            if key not in self.known:
                self.known[key] = named_annotations(self.graph, dict([key]), self.base.sizes, self.values)
            found |= self.known[key]
        return self.base.with_annotations(found)

    def values(self, name: str) -> dict[str, int]:
        """The values that an annotation is of, by unique names."""
        if name not in self.found:
            self.found[name] = paths.find_all(self.graph.names, name, self.places)
        return self.found[name]

    def value(self, name: str, among: Mapping[str, P]) -> int:
        """A value that an annotation is of, and no other one by its own name."""
        values = self.values(name)
        return next((v for each, v in values.items() if each == name or each not in among), next(iter(values.values())))

    def arguments(self, is_wanted: Callable[[int, Spec], bool]) -> Iterator[tuple[str, P]]:
        """Names of arguments with what the plan wants: a pattern for those of equal layers, then the others by name."""
        groups: defaultdict[str, defaultdict[Spec, list[str]]] = defaultdict(lambda: defaultdict(list))
        for v in self.graph.inputs:
            name, wanted = self.graph.first_names.get(v), self.wanted[v]
            if name is not None and wanted is not None and v not in self.graph.annotations and is_wanted(v, wanted):
                groups[self.graph.layers.pattern(name)][wanted].append(name)
        for pattern, by_spec in groups.items():
            most = max(by_spec, key=lambda spec: len(by_spec[spec]))
            matched = [name for names in by_spec.values() for name in names]
            if len(by_spec[most]) > 1 and sorted(self.values(pattern)) == sorted(matched):
                yield pattern, to_partition_spec(most)
                del by_spec[most]
            yield from ((name, to_partition_spec(spec)) for spec, names in by_spec.items() for name in names)

    def missing(self, now: Assignment) -> dict[str, P]:
        """Annotations of arrays that are sharded otherwise than wanted: of equal ones those that one line computes."""
        by_group: defaultdict[int, list[int]] = defaultdict(list)
        for v in self.in_order():
            wanted = self.wanted[v]
            if wanted is not None and now.specs[v].axes != wanted.axes and v not in self.graph.annotations:
                by_group[self.alike(v)].append(v)
        found: dict[str, P] = {}
        for values in by_group.values():
            differ = {v for v in values if v in self.ends}
            if differ:
                found.update(self.arguments(lambda v, _, differ=differ: v in differ))
            inside = [v for v in values if v not in self.ends and self.places.of(v)]
            if inside:
                found.update(self.inside([v for v in inside if self.places.of(v) == self.places.of(inside[0])]))
        return found

    def in_order(self) -> Iterator[int]:
        yield from self.graph.inputs
        for op in self.graph.ops:
            yield from (v for v in op.results if v not in self.ends and not self.graph.manual.get(v))

    def inside(self, values: Sequence[int]) -> dict[str, P]:
        """Annotations of values that one line computes."""
        place = self.places.of(values[0])
        if not place:
            return {}
        names = self.places.find(place)
        spec = to_partition_spec(self.wanted[values[0]] or Spec(dims=()))
        if {*names.values()} == {*values}:
            return {place: spec}
        return {name: spec for name, v in names.items() if v in values}

    def without_useless(self, best: Annotated, fits: Fits, deadline: float) -> Annotated:
        """The same without the annotations that save nothing, the last ones first."""

        def is_as_fast(fewer: Annotated) -> bool:
            return score_at(fewer.costs, best.costs.peak_bytes) < CLOSE * score(best.costs)

        def is_as_good(fewer: Annotated) -> bool:
            return is_better(fewer.costs, best.costs, CLOSE) and (fits(fewer.costs) or not fits(best.costs))

        left = self.fewer(best, is_as_fast, deadline)  # without the time that it takes to predict each peak
        if left is not best and not is_as_good(left):
            left = self.fewer(best, is_as_good, deadline)
        return best if left is best else self.without_idle(left)

    def fewer(self, best: Annotated, is_enough: Callable[[Annotated], bool], deadline: float) -> Annotated:
        """The same without each annotation, the last ones first, without which it is good enough."""
        units: defaultdict[tuple[str, P], list[str]] = defaultdict(list)
        for key, spec in self.free(best).items():
            units[key.partition("#")[0], spec].append(key)
        for keys in reversed(units.values()):
            if time.monotonic() < deadline and all(":" in key or self.is_exception(key, best) for key in keys):
                fewer = self.completed({k: spec for k, spec in best.annotations.items() if k not in keys})
                best = fewer if is_enough(fewer) else best
        return best

    def is_exception(self, key: str, best: Annotated) -> bool:
        """Whether the values of an annotation are also of another one, from which they differ."""
        own = self.values(key).items()
        return any(own <= self.values(other).items() for other in best.annotations if other != key)

    def free(self, found: Annotated) -> dict[str, P]:
        """The annotations that may be left out."""
        return {name: spec for name, spec in found.annotations.items() if name not in self.kept}

    def without_idle(self, best: Annotated, names: Sequence[str] | None = None) -> Annotated:
        """The same without those of some annotations that change nothing: all at once, or each half by itself."""
        keys = list(self.free(best)) if names is None else names
        left = set(keys)
        fewer = {k: spec for k, spec in best.annotations.items() if k not in left}
        assignment = self.with_annotations(fewer)
        if _shardings(assignment) == _shardings(best.assignment):
            return Annotated(annotations=fewer, assignment=assignment, costs=best.costs)
        if len(keys) > 1:
            half = len(keys) // 2
            best = self.without_idle(best, keys[half:])
            best = self.without_idle(best, keys[:half])
        return best


def _shardings(assignment: Assignment) -> tuple[tuple[tuple[Axis, ...], ...], ...]:
    """How each value is sharded, which determines what the program costs."""
    return tuple(spec.axes for spec in assignment.specs)


def is_close(costs: ProgramCosts, goal_seconds: float) -> bool:
    """Whether a program takes about the time that its plan wants."""
    return costs.seconds <= CLOSE * goal_seconds


def rank(costs: Costs | ProgramCosts, fits: Fits) -> tuple[int, float]:
    """The order of plans: those that fit by their score, then the others by peak memory."""
    return (0, score(costs)) if fits(costs) else (1, costs.peak_bytes)


def score(costs: Costs | ProgramCosts) -> float:
    """Seconds of a step, and a little of what it sends and holds: of plans about as fast the smaller one is better."""
    return score_at(costs, costs.peak_bytes)


def score_at(costs: Costs | ProgramCosts, peak_bytes: int) -> float:
    """The score if the peak were this one, without the time that it takes to predict it."""
    return costs.seconds * (1 + costs.wire_bytes + peak_bytes) ** BYTES_EXPONENT


def is_better(costs: ProgramCosts, than: ProgramCosts, factor: float) -> bool:
    """Whether the score is below another one's times a factor, also at the peak of the other one."""
    limit = factor * score(than)
    return score_at(costs, than.peak_bytes) < limit and score(costs) < limit
