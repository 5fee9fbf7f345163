"""Single annotations worth trying: other specs of arguments, and of arrays that conflicts and replication make costly.

Equal layers are annotated together. An annotation replaces the one that a value has, and that of its gradient.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..graph import Annotation, Graph, Op, Places
from ..propagation import Assignment
from ..propagation.dim_classes import DimClasses
from ..spec import Axis, Dim, Spec, num_parts, to_partition_spec
from .conflict_list import Conflicts

SpecAxes = tuple[tuple[Axis, ...], ...]
"""The axes of each dim."""

MAX_CONFLICTS = 8
"""Conflicts, after merging equal layers, whose arrays are tried."""
MAX_REPLICATED = 6
"""Places in the program whose replicated arrays are tried."""
PASSED_ON = frozenset(
    {"annotate", "convert_element_type", "copy", "edge", "reshape", "scan xs", "squeeze", "transpose"}
)
"""Ops behind which an argument is still the same array."""
MULTIPLIED = frozenset({"conv_general_dilated", "dot_general", "gather", "ragged_dot"})
"""Ops that read parameters, but not the optimizer's state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Values that get one annotation: an argument, an array inside the program, or those of equal layers."""

    names: tuple[str, ...]
    """As `Completion.annotate` takes them."""
    values: tuple[int, ...]
    source: str
    """The line of the annotation that is replaced, else of the op that computes the value, or first reads it."""
    axes: SpecAxes
    """Of the current spec."""
    annotated: SpecAxes | None
    """Of the annotation that is replaced; None if there is none."""
    form: tuple[tuple[int, int], ...]
    """The size and the class of each dim: those of optimizer state are those of its parameters."""
    is_inside: bool = False
    """Whether it is no argument."""
    follows: bool = False
    """Whether it is an argument of the form of another one that products read: optimizer state of a parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One annotation, and the completion with it."""

    target: Target
    axes: SpecAxes
    assignment: Assignment
    settles: bool = False
    """Whether it gives an array at a conflict the axes that were rejected."""

    @property
    def extends(self) -> bool:
        """Whether it only adds axes to a spec that has some: to the annotated one, where there is one."""
        have = self.target.axes if self.target.annotated is None else self.target.annotated
        return any(have) and all(set(own) <= set(more) for own, more in zip(have, self.axes, strict=True))

    @property
    def likelihood(self) -> float:
        """How likely it is what was meant, from 0 to 1: the exponent of the ratio of its costs to the present ones.

        A choice that was made, to annotate an array and over how many axes, is more likely meant than one that was not.
        """
        if self.target.is_inside and not self.settles:
            return 1 / 3
        return 1 / 2 if self.extends or self.target.follows else 1

    @property
    def moves(self) -> bool:
        """Whether it has the axes of the annotation that it replaces, on other dims."""
        have = self.target.annotated
        return have is not None and sorted(map(str, sum(have, ()))) == sorted(map(str, sum(self.axes, ())))

    def is_alternative(self, other: Candidate) -> bool:
        """Whether it annotates the same values as another, or optimizer state where the other has the parameters."""
        return self.target.names == other.target.names or (
            self.target.follows and self.target.form == other.target.form
        )


def candidates(assignment: Assignment) -> Iterator[Candidate]:
    """Yields annotations that change something, those of parameters first; each result once."""
    found = _Targets(assignment)
    seen = {assignment.specs}
    for target, specs, settles in found.all():
        for axes in specs:
            changed = assignment.with_annotations(found.annotations(target, axes))
            if changed.specs not in seen:
                seen.add(changed.specs)
                yield Candidate(target=target, axes=axes, assignment=changed, settles=settles)


class _Targets:
    """The values of one program that are worth an annotation, with the specs to try."""

    def __init__(self, assignment: Assignment):
        self.assignment, self.graph, self.sizes = assignment, assignment.graph, assignment.sizes
        self.given: Mapping[int, Annotation] = (
            assignment.given.annotations if assignment.given else self.graph.annotations
        )
        self.axes: tuple[Axis, ...] = tuple(axis for axis, size in self.sizes.items() if size > 1)
        self.inputs = set(self.graph.inputs)

    @cached_property
    def classes(self) -> DimClasses:
        return DimClasses(self.graph)

    @cached_property
    def places(self) -> Places:
        return Places(self.graph)

    def all(self) -> Iterator[tuple[Target, list[SpecAxes], bool]]:
        """Targets with the specs to try, and whether they are at a conflict."""
        for target in self.arguments():
            yield target, self.specs(target), False
        for target, axes in self.contested():
            yield target, self.with_axes(target, axes), True
        for target in self.replicated():
            yield target, self.specs(target), False

    def annotations(self, target: Target, axes: SpecAxes) -> dict[int, Annotation]:
        """The annotation of each value of a target, and of the gradients whose annotations it replaces."""
        spec = Spec(dims=tuple(Dim(axes=own, open=False) for own in axes))
        new = Annotation(spec=spec, origin=f"suggested: {to_partition_spec(spec)}")
        values = list(target.values)
        if target.annotated is not None:
            forms = {self.classes.form(v) for v in values}
            origins = {self.given[v].origin for v in values}
            inside = (v for v in self.given if v not in self.inputs and self.given[v].origin in origins)
            values += [v for v in inside if self.classes.form(v) in forms]
        return dict.fromkeys(values, new)

    def arguments(self) -> list[Target]:
        """The arguments, equal layers together; first those that products and gathers read, such as parameters."""
        groups: dict[tuple, list[int]] = {}
        for v in self.graph.inputs:
            name = self.graph.first_names.get(v)
            if name is not None and self.graph.shapes[v]:
                key = self.graph.layers.pattern(name), self.graph.shapes[v], self.current(v), self.annotated(v)
                groups.setdefault(key, []).append(v)
        found = [self.target([self.graph.first_names[v] for v in values], values) for values in groups.values()]
        multiplied = [target for target in found if self.is_multiplied(target.values[0])]
        forms = {target.form for target in multiplied}
        others = [target for target in found if target not in multiplied]
        return multiplied + [dataclasses.replace(target, follows=target.form in forms) for target in others]

    def target(self, names: Sequence[str], values: Sequence[int]) -> Target:
        v = values[0]
        readers = (op.source for op in self.readers(v) if op.source)
        source = self.graph.makers[v].source if v in self.graph.makers else next(readers, "")
        annotated = self.annotated(v)
        return Target(
            names=tuple(names),
            values=tuple(values),
            source=source if annotated is None else self.given[v].origin,
            axes=self.current(v),
            annotated=annotated,
            form=self.classes.form(v),
            is_inside=v not in self.inputs,
        )

    def current(self, v: int) -> SpecAxes:
        return self.assignment.specs[v].axes

    def annotated(self, v: int) -> SpecAxes | None:
        """The axes of a value's annotation, if it shards any dim."""
        axes = self.given[v].spec.axes if v in self.given else ()
        return axes if any(axes) else None

    @cached_property
    def argument_forms(self) -> set[tuple[tuple[int, int], ...]]:
        """The forms of arguments, which gradients and updates of parameters have, too."""
        return {self.classes.form(v) for v in self.graph.inputs}

    def readers(self, v: int) -> Iterator[Op]:
        """The ops that read an array, or the same array behind ops that pass it on."""
        reached, passed = [v], {v}
        while reached:
            for op in self.graph.users.get(reached.pop(0), ()):
                if op.name in PASSED_ON:
                    reached += [r for r in op.results if r not in passed]
                    passed.update(op.results)
                else:
                    yield op

    def is_multiplied(self, v: int) -> bool:
        """Whether an op that sums over a dim, or picks by indices, reads an argument, as those that read parameters."""
        return any(op.name in MULTIPLIED for op in self.readers(v))

    def contested(self) -> Iterator[tuple[Target, tuple[Axis, ...]]]:
        """The arrays at conflicts, most bytes first, with the axes that the rejected side asked for."""
        for equal in Conflicts(self.assignment.conflicts, self.graph.layers).grouped()[:MAX_CONFLICTS]:
            for claims in zip(*((c.kept, c.lost) for c in equal.members), strict=True):
                values = dict.fromkeys(claim.value for claim in claims)
                found = self.inside([v for v in values if v not in self.inputs])
                if found is not None:
                    yield found, equal.first.lost.axes or equal.first.kept.axes

    def replicated(self) -> Iterator[Target]:
        """The arrays inside the program that take most bytes beyond their share of the mesh, by line."""
        groups: dict[tuple, list[int]] = {}
        wasted: dict[tuple, int] = {}
        num_devices = num_parts(self.axes, self.sizes)
        for op in self.graph.ops:
            for v in op.results:
                if self.graph.shapes[v] and v not in self.inputs and op.name != "edge":
                    key = op.source, op.name, self.graph.shapes[v], self.current(v)
                    own = self.graph.num_bytes(v) // self.assignment.specs[v].num_shards(self.sizes)
                    groups.setdefault(key, []).append(v)
                    wasted[key] = wasted.get(key, 0) + own - self.graph.num_bytes(v) // num_devices
        for key in sorted(groups, key=lambda key: -wasted[key])[:MAX_REPLICATED]:
            found = self.inside(groups[key]) if wasted[key] else None
            if found is not None:
                yield found

    def inside(self, values: Sequence[int]) -> Target | None:
        """Unnamed values of one line and shape as a target; None if they can't be annotated."""
        free = [v for v in values if v not in self.given and not _is_at_shard_map(self.graph, v)]
        if not free or not any(self.graph.shapes[v] for v in free):
            return None
        op = self.graph.makers.get(free[0])
        if op is None or not op.source:
            return None
        place = f"{op.source.partition(' ')[0]}/{op.name}"
        names = {v: name for name, v in self.places.find(place).items()}
        found = {v: names[v] for v in free if v in names and self.graph.shapes[v] == self.graph.shapes[free[0]]}
        target = self.target(list(found.values()), list(found)) if found else None
        return None if target is None or target.form in self.argument_forms else target

    def specs(self, target: Target) -> list[SpecAxes]:
        """The specs to try for a target: more axes on some dims; for an annotation its axes on other dims, or less."""
        ndim = len(target.axes)
        found = [*self.extended(target.axes)]
        if target.annotated is None:
            found += self.extended(((),) * ndim)
        else:
            found += list(itertools.permutations(target.annotated))
            found += [moved for d in range(ndim) for moved in _moved(target.annotated, d)]
        return self.valid(target, found)

    def with_axes(self, target: Target, axes: Sequence[Axis]) -> list[SpecAxes]:
        """The current spec of a target with the given axes on one dim, and on no other one."""
        rest = [tuple(a for a in own if a not in axes) for own in target.axes]
        return self.valid(target, [_put(rest, d, tuple(axes)) for d in range(len(rest))])

    def extended(self, axes: SpecAxes) -> Iterator[SpecAxes]:
        """Some of the free mesh axes on one dim, or two of them on two dims."""
        free = [axis for axis in self.axes if not any(axis in own or (axis,) == own[:1] for own in axes)]
        free = [axis for axis in free if not any(axis == part[0] for own in axes for part in own if part != axis)]
        for size in range(1, len(free) + 1):
            for some in itertools.combinations(free, size):
                yield from (_put(axes, d, (*axes[d], *some)) for d in range(len(axes)))
        for a, b in itertools.permutations(free, 2):
            for d, e in itertools.combinations(range(len(axes)), 2):
                yield _put(_put(axes, d, (*axes[d], a)), e, (*axes[e], b))

    def valid(self, target: Target, specs: Sequence[SpecAxes]) -> list[SpecAxes]:
        """Those that divide the dims, each once, without the spec as it is."""
        shape = self.graph.shapes[target.values[0]]
        have = target.axes if target.annotated is None else target.annotated
        return [
            axes
            for axes in dict.fromkeys(specs)
            if axes != have and all(n % num_parts(own, self.sizes) == 0 for n, own in zip(shape, axes, strict=True))
        ]


def _put(axes: Sequence[tuple[Axis, ...]], d: int, own: tuple[Axis, ...]) -> SpecAxes:
    return (*axes[:d], own, *axes[d + 1 :])


def _moved(axes: SpecAxes, d: int) -> Iterator[SpecAxes]:
    """One axis of a dim on another dim, or on none."""
    for axis in axes[d]:
        rest = _put(axes, d, tuple(a for a in axes[d] if a != axis))
        yield rest
        yield from (_put(rest, e, (*rest[e], axis)) for e in range(len(axes)) if e != d)


def _is_at_shard_map(graph: Graph, v: int) -> bool:
    """Whether a value enters or leaves the body of a `shard_map`."""
    site = graph.sites[v]
    return bool(site) and site[0].primitive.name == "shard_map"


def local_bytes(assignment: Assignment) -> float:
    """Bytes of all arrays that a device computes in one call: a rough measure of its work."""
    graph, shards = assignment.graph, dict[Spec, int]()
    times = {v: op.times for op in graph.ops for v in op.results}
    total = 0.0
    for v, spec in enumerate(assignment.specs):
        if spec not in shards:
            shards[spec] = spec.num_shards(assignment.sizes)
        total += times.get(v, 1) * graph.num_bytes(v) / shards[spec]
    return total
