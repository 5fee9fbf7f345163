"""Values and ops of a program, flattened from a jaxpr.

Bodies of `jit`, `custom_jvp`, `custom_vjp` and remat are inlined, once per call. Bodies of `scan`, `while` and `cond`
appear once, with a trip count; *edges* tie their operands and results to the values outside: ops whose sources and
target are all sharded identically. A constant expression (`zeros`, `iota`, a broadcast scalar) is not a value: every
use gets its own copy, since each device generates what it needs. `Scope` maps the variables of every jaxpr to values,
which `constrain` uses to rewrite the program.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache, cached_property
from typing import Any

from .. import compat
from ..errors import ShardingError
from ..paths import Layers
from ..rules import Rule
from .annotation import Annotation
from .derived_facts import DerivedFacts

Atom = int | None
"""A value's index; None for a constant expression."""


Site = tuple[Any, ...]
"""An equation and those around it, innermost first; empty for the program's own edges."""


def line(site: Site) -> str:
    """Returns `file.py:line (function)` of the innermost equation that has source information."""
    return next((text for eqn in site if (text := compat.source_line(eqn))), "")


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop of unknown length: a `while_loop`, whose body counts as run once and its condition as run twice."""

    source: str
    """The user's line; empty if unknown."""
    is_condition: bool
    """Whether an op is in the condition, which is evaluated once more than the body."""


Trips = int | Mapping[str, int]
"""How often the loops of unknown length run: all of them, or each by the start of its line, as `decode.py:31`."""


@dataclass(slots=True, eq=False)
class Op:
    """An equation, or an edge of a loop, a branch or the program's results."""

    name: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    rule: Rule | None
    site: Site
    times: int
    """Number of runs per call of the program: the product of trip counts, where an unknown one counts as 1."""
    loops: tuple[Loop, ...] = ()
    """The enclosing loops of unknown length, outermost first."""

    @property
    def is_unknown(self) -> bool:
        """Whether nothing is known of how its arrays can be sharded."""
        return self.rule is None or self.rule.is_opaque

    @property
    def has_effects(self) -> bool:
        """Whether it does more than compute its results, such as a callback that prints."""
        return self.name != "edge" and bool(self.site) and compat.has_side_effects(self.site[0])

    @property
    def source(self) -> str:
        """`file.py:line (function)` in the user's code; empty if unknown."""
        return line(self.site)


@dataclass(frozen=True, slots=True)
class Group:
    """Values that share one spec, by `sharding.same`."""

    members: tuple[int, ...]
    site: Site


@dataclass(slots=True, eq=False)
class Scope:
    """An instance of a jaxpr: the values of its variables, and the scopes of the jaxprs in its equations."""

    jaxpr: Any
    env: dict[Any, Atom] = field(default_factory=dict)
    scalars: dict[Any, set[int]] = field(default_factory=dict)
    """For each variable that is a constant expression, the scalars that are broadcast in it, if any."""
    children: dict[tuple[int, str, int], Scope] = field(default_factory=dict)
    entries: dict[int, list[Atom]] = field(default_factory=dict)
    """For each equation with edges: per operand the target of its edge, or None."""
    exits: list[Atom] = field(default_factory=list)
    """For each result of the jaxpr, the target of its edge, or None."""
    stacked_inputs: list[Atom] = field(default_factory=list)
    """For each argument of a `scan` body, the stacked array of which it is a slice, or None."""
    stacked_outputs: list[Atom] = field(default_factory=list)
    """For each result of a `scan` body, the stacked array that it is written to, or None."""
    opaque: dict[int, Op] = field(default_factory=dict)
    """For each equation of which nothing is known, and which may have no results, its op."""
    manual: frozenset[str] = frozenset()
    """Manual axes of enclosing `shard_map`s, over which no value here can be sharded."""
    divergent: bool = False
    """Whether devices along those axes may differ in whether, or how often, they run it."""

    def children_of(self, primitive: str) -> Iterator[tuple[Any, Scope]]:
        """Yields the equations of a primitive, each with the scope of one of its jaxprs."""
        for (i, _, _), child in self.children.items():
            if self.jaxpr.eqns[i].primitive.name == primitive:
                yield self.jaxpr.eqns[i], child

    def scalars_of(self, atoms: Sequence[Any]) -> set[int]:
        """The scalars that are broadcast in the constant expressions among some variables."""
        variables = [a for a in atoms if not compat.is_literal(a)] if self.scalars else []
        return {scalar for v in variables for scalar in self.scalars.get(v, ())}


@dataclass(eq=False)
class Graph(DerivedFacts):
    """Values and ops of a program, independent of devices."""

    shapes: list[tuple[int, ...]] = field(default_factory=list)
    dtypes: list[Any] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)
    """For each value, the site of its producer; empty for arguments."""
    ops: list[Op] = field(default_factory=list)
    annotations: dict[int, Annotation] = field(default_factory=dict)
    annotation_conflicts: list[tuple[int, Annotation, Annotation]] = field(default_factory=list)
    """Conflicting annotations of one value: (value, annotation kept, annotation dropped)."""
    groups: list[Group] = field(default_factory=list)
    manual: dict[int, frozenset[str]] = field(default_factory=dict)
    """For values inside or at the boundary of a `shard_map`, the axes they cannot be sharded over."""
    divergent: set[int] = field(default_factory=set)
    """Values computed where control flow may differ between devices, so that no op may synchronize all of them."""
    dependencies: dict[int, set[int]] = field(default_factory=dict)
    """Value -> what it depends on beside its op's operands: the condition of a loop, the index of a branch, and scalars
    that are broadcast in constant expressions, which are not values."""
    decisive: set[int] = field(default_factory=set)
    """The conditions of branches and loops with effects: whether these happen depends on them."""
    memory_kinds: dict[int, str] = field(default_factory=dict)
    """Value -> its kind of memory, such as `pinned_host`, where that is not the device's."""
    output_memory_kinds: list[str | None] = field(default_factory=list)
    """The kind of memory of each result of the program; None is the device's."""
    names: dict[str, int] = field(default_factory=dict)
    """Name or path -> value."""
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    replicated_by_default: frozenset[int] = frozenset()
    """Arguments that arrive replicated over the mesh as JAX creates arrays, which counts as open."""
    unused_axis_rules: tuple[str, ...] = ()
    """The axis rules that no annotation comes from, each as `mlp -> tensor`."""
    scope: Scope | None = None
    trips: Trips = field(default_factory=dict)
    """The trip counts that were given for loops of unknown length."""
    derived: dict[str, Any] = field(default_factory=dict, init=False, repr=False)
    """What `once` keeps: found out about the program by its ops, for all of its shardings, whatever its annotations."""

    @cached_property
    def live_values(self) -> frozenset[int]:
        """The values that an output or an effect of the program depends on; the rest is dead code."""
        effects = (op for op in self.ops if op.has_effects)
        waiting = [*self.outputs, *self.decisive, *(v for op in effects for v in op.operands)]
        live = set(waiting)
        while waiting:
            v = waiting.pop()
            op = self.makers.get(v)
            new = {*(op.operands if op is not None else ()), *self.dependencies.get(v, ())} - live
            live |= new
            waiting += new
        return frozenset(live)

    def scopes(self) -> Iterator[Scope]:
        """The scopes of the program, outer ones first."""
        waiting = [] if self.scope is None else [self.scope]
        while waiting:
            scope = waiting.pop()
            yield scope
            waiting += scope.children.values()

    @cached_property
    def inputs_used(self) -> list[bool]:
        """For each argument, whether a result depends on it: others are not in the compiled program."""
        assert self.scope is not None
        return compat.inputs_used(self.scope.jaxpr, [True] * len(self.outputs))

    @cached_property
    def regions(self) -> dict[int, Scope]:
        """id of an equation -> the innermost loop, branch or recomputation of it: XLA merges nothing across them."""
        found: dict[int, Scope] = {}
        waiting: list[tuple[Scope, Scope | None]] = [(self.scope, None)] if self.scope is not None else []
        while waiting:
            one, region = waiting.pop()
            if region is not None:
                found.update((id(eqn), region) for eqn in one.jaxpr.eqns)
            for (i, _, _), child in one.children.items():
                eqn = one.jaxpr.eqns[i]
                is_region = eqn.primitive.name in ("cond", "scan", "while") or compat.is_recomputed(eqn)
                waiting.append((child, child if is_region else region))
        return found

    def is_live(self, op: Op, live: Collection[int]) -> bool:
        """Whether an op of arrays is run, given `live_values`."""
        return any(v in live for v in op.results) or (bool(op.operands) and op.has_effects)

    @cached_property
    def live_ops(self) -> tuple[Op, ...]:
        """The ops of arrays that are run, in program order."""
        live = self.live_values
        return tuple(op for op in self.ops if self.is_live(op, live))

    @cached_property
    def unknown_ops(self) -> tuple[Op, ...]:
        """The ops of arrays without a rule."""
        return tuple(
            op for op in self.ops if op.is_unknown and any(self.shapes[v] for v in (*op.operands, *op.results))
        )

    @property
    def unknown(self) -> Counter[str]:
        """Primitives without a rule, and the number of their ops."""
        return Counter(op.name for op in self.unknown_ops)

    def with_annotations(self, annotations: Mapping[int, Annotation]) -> Graph:
        """Returns the same program with the given annotations added or replaced."""
        changed = copy.copy(self)  # with what is known of the program, which no annotation changes
        changed.annotations = {**self.annotations, **annotations}
        return changed

    def with_trips(self, trips: Trips) -> Graph:
        """Returns the same program with trip counts for loops of unknown length.

        Raises:
            ShardingError: a negative count, or a line at which there is no such loop.
        """
        known = list(dict.fromkeys(loop.source for op in self.ops for loop in op.loops))
        faults = [f"{n} iterations" for n in ([trips] if isinstance(trips, int) else trips.values()) if n < 0]
        for key in {} if isinstance(trips, int) else trips:
            faults += [] if any(source.startswith(key) for source in known) else [f"no loop at {key}"]
        if faults:
            raise ShardingError(
                f"with_trips({trips!r})",
                found=faults,
                required="numbers of iterations, by the start of a line with a loop of unknown length",
                fix=[f"{source!r}" for source in known if source],
            )
        ops = [op if not op.loops else _with_trips(op, trips) for op in self.ops]
        return dataclasses.replace(self, ops=ops, trips=trips)

    def diverges(self, op: Op) -> bool:
        """Whether only some devices may run an op."""
        return not self.divergent.isdisjoint(op.results or op.operands)

    def changes_memory(self, op: Op) -> bool:
        """Whether an op copies its operand between the memories of host and device."""
        kinds = [self.memory_kinds.get(v) for v in (*op.operands, *op.results)]
        return op.name == "device_put" and len({*kinds}) > 1

    def num_bytes(self, value: int) -> int:
        """Returns the global size of a value in bytes."""
        return math.prod(self.shapes[value]) * self.itemsize(value)

    def itemsize(self, value: int) -> int:
        """Returns the bytes of an element; 0 for random keys whose dtype has no item size."""
        return int(getattr(self.dtypes[value], "itemsize", 0) or 0)

    def label(self, value: int) -> str:
        """Returns the first name of a value, or its type, such as `float32[8, 16]`, if it has none."""
        return self.first_names.get(value) or f"{self.dtypes[value]}{list(self.shapes[value])}"

    @cached_property
    def dtype_names(self) -> list[str]:
        """The dtype of each value, as text."""
        return list(map(cache(str), self.dtypes))

    @cached_property
    def makers(self) -> dict[int, Op]:
        """Value -> the op that produces it; arguments and constants are missing."""
        return {v: op for op in self.ops for v in op.results}

    @cached_property
    def users(self) -> Mapping[int, Sequence[Op]]:
        """Value -> the ops that read it, once per operand."""
        found: defaultdict[int, list[Op]] = defaultdict(list)
        for op in self.ops:
            for v in op.operands:
                found[v].append(op)
        return found

    @cached_property
    def num_uses(self) -> Counter[int]:
        """Value -> how often ops read it and the program returns it."""
        return Counter([*(v for op in self.ops for v in op.operands), *self.outputs])

    @cached_property
    def times(self) -> dict[int, int]:
        """Value -> how often it is computed; without constants, which are materialized where they are used."""
        return {**{v: op.times for v, op in self.makers.items()}, **dict.fromkeys(self.inputs, 1)}

    @cached_property
    def loop_invariants(self) -> dict[int, int]:
        """Loop invariant -> how often the loop runs."""
        return {op.results[0]: op.times for op in self.ops if op.name == "edge" and op.site and len(op.operands) == 1}

    @cached_property
    def first_names(self) -> dict[int, str]:
        """Value -> its first name."""
        first: dict[int, str] = {}
        for name, v in self.names.items():
            first.setdefault(v, name)
        return first

    @cached_property
    def layers(self) -> Layers:
        """The equal layers among the named values."""
        return Layers.of({name: self.shapes[v] for name, v in self.names.items()})

    @cached_property
    def representatives(self) -> Sequence[int]:
        """Value -> the representative of all values that share its spec; itself if it is in no group."""
        parents = list(range(len(self.shapes)))

        def root(v: int) -> int:
            while parents[v] != v:
                v = parents[v]
            return v

        for group in self.groups:
            for v in group.members:
                a, b = root(group.members[0]), root(v)
                parents[max(a, b)] = min(a, b)
        return [root(v) for v in parents] if self.groups else parents

    def members(self, value: int) -> list[int]:
        """Returns a value, then all others in its group."""
        representative = self.representatives[value]
        tied = {v for group in self.groups for v in group.members if self.representatives[v] == representative}
        return [value, *sorted(tied - {value})]

    def group_site(self, a: int, b: int) -> Site:
        """Returns the site of the `same` that joins two values, or the first with `a` if no single one does."""
        found = [group for group in self.groups if a in group.members]
        return next((group.site for group in found if b in group.members), found[0].site if found else ())

    def source(self, value: int) -> str:
        """Returns the user's line that produces a value; empty for arguments."""
        return line(self.sites[value])


def trip_count(source: str, trips: Trips) -> int | None:
    """How often a loop at a line runs; None if it is not given."""
    if isinstance(trips, int):
        return trips
    return next((n for key, n in trips.items() if source.startswith(key)), None)


def _with_trips(op: Op, trips: Trips) -> Op:
    runs, left = Fraction(op.times), []
    for loop in op.loops:
        count = trip_count(loop.source, trips)
        if count is None:
            left.append(loop)
        else:
            runs *= Fraction(count + 1, 2) if loop.is_condition else count
    return dataclasses.replace(op, times=int(runs), loops=tuple(left))
