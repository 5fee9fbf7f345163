"""A program as the pass sees it: values and ops, flattened from a jaxpr.

Bodies of `jit`, `custom_jvp`, `custom_vjp` and remat appear inline, once per call. Bodies of `scan`, `while` and `cond`
appear once, with a trip count; what enters or leaves them is tied by *edges*: ops whose sources and target are all
split alike. A constant expression (`zeros`, `iota`, a broadcast scalar) is no value: every use gets one of its own,
since each device makes what it needs. The graph is a view: `Scope` says which variable of which jaxpr is which value,
so that `constrain` finds its way back.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from .. import compat
from ..rules import Rule
from ..spec import Spec

CALLS = frozenset(
    """
    call checkpoint closed_call composite core_call custom_jvp_call custom_vjp_call custom_vmap_call jit linear_call
    pjit remat remat2 xla_metadata_call
    """.split()
)
"""Primitives whose body runs exactly once, in place."""

Atom = int | None
"""A value's index; None for a constant expression."""

Site = tuple[Any, ...]
"""The equation that something comes from, and the calls around it, innermost first; empty for the program's edges."""


def line(site: Site) -> str:
    """`file.py:line (function)` of the innermost equation whose line JAX kept."""
    return next((text for eqn in site if (text := compat.source_line(eqn))), "")


@dataclass(slots=True, eq=False)
class Op:
    """One op: an equation, or an edge of a loop, a branch or the program's own results."""

    name: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    rule: Rule | None
    site: Site
    """Where it comes from."""
    times: int
    """How often it runs per call of the program (trip counts multiplied; an unknown one counts as 1)."""

    @property
    def source(self) -> str:
        """`file.py:line (function)` of the user's line; empty if unknown."""
        return line(self.site)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """What an annotation says of a value."""

    spec: Spec
    origin: str
    """Who says so: `in_shardings`, `annotate at train.py:12 (step)`, ..."""

    def said(self, dim: int) -> str:
        """Who says what of one dim, with the logical name if it was said by one."""
        via = self.spec.dims[dim].via
        return f"{self.origin}: {via}" if via else self.origin


@dataclass(frozen=True, slots=True)
class Group:
    """Values that are split alike, by `sharding.same`."""

    members: tuple[int, ...]
    site: Site


@dataclass(slots=True, eq=False)
class Scope:
    """One run of one jaxpr: its variables' values, and the runs of the jaxprs inside its equations."""

    jaxpr: Any
    env: dict[Any, Atom] = field(default_factory=dict)
    children: dict[tuple[int, str, int], Scope] = field(default_factory=dict)
    entries: dict[int, list[Atom]] = field(default_factory=dict)
    """Per equation with edges: for each operand the value that it enters, or None."""
    exits: list[Atom] = field(default_factory=list)
    """For each result of the jaxpr the value that it enters, or None."""
    read: list[Atom] = field(default_factory=list)
    """For each argument of a loop's body the stack of which it is a slice, or None."""
    added: list[Atom] = field(default_factory=list)
    """For each result of a loop's body the stack to which it is added, or None."""
    manual: frozenset[str] = frozenset()
    """Mesh axes that a `shard_map` around has taken: no value here can be split by them."""
    divergent: bool = False
    """Whether devices that differ along those axes may differ in whether, or how often, they run it."""


@dataclass(eq=False)
class Graph:
    """Values and ops of one program; no device in sight."""

    shapes: list[tuple[int, ...]] = field(default_factory=list)
    dtypes: list[Any] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)
    """Per value where it is made; empty for arguments."""
    ops: list[Op] = field(default_factory=list)
    pins: dict[int, Pin] = field(default_factory=dict)
    clashes: list[tuple[int, Pin, Pin]] = field(default_factory=list)
    """Values that two annotations want differently: (value, the one kept, the other)."""
    groups: list[Group] = field(default_factory=list)
    manual: dict[int, frozenset[str]] = field(default_factory=dict)
    """Of values in and around a `shard_map` the axes that they can't take."""
    divergent: set[int] = field(default_factory=set)
    """Values that are made where devices may differ in what they run: nothing there may wait for all of them."""
    spread: list[int] = field(default_factory=list)
    """Scalars that are broadcast: what is made of them is no value, and yet needs them."""
    names: dict[str, int] = field(default_factory=dict)
    """Name or path -> value."""
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    scope: Scope | None = None

    @property
    def unknown(self) -> dict[str, int]:
        """Primitives without a rule and how many ops have them."""
        counts: dict[str, int] = {}
        for op in self.ops:
            if op.rule is None and any(self.shapes[v] for v in (*op.operands, *op.results)):
                counts[op.name] = counts.get(op.name, 0) + 1
        return counts

    def with_pins(self, pins: Mapping[int, Pin]) -> Graph:
        """The same program with other annotations on some values."""
        return dataclasses.replace(self, pins={**self.pins, **pins})

    def diverges(self, op: Op) -> bool:
        """Whether devices may differ in whether they run an op."""
        return not self.divergent.isdisjoint(op.results)

    def num_bytes(self, value: int) -> int:
        """Bytes of a whole value."""
        return math.prod(self.shapes[value]) * self.itemsize(value)

    def itemsize(self, value: int) -> int:
        """Bytes of an element; of random keys 0 unless their dtype says."""
        return int(getattr(self.dtypes[value], "itemsize", 0) or 0)

    def label(self, value: int) -> str:
        """The first name of a value; of one that has none its type, as `float32[8, 16]`."""
        return self.first_names.get(value) or f"{self.dtypes[value]}{list(self.shapes[value])}"

    @cached_property
    def makers(self) -> dict[int, Op]:
        """Value -> the op that makes it; arguments and constants are not there."""
        return {v: op for op in self.ops for v in op.results}

    @cached_property
    def first_names(self) -> dict[int, str]:
        """Value -> its first name, in the order of the names."""
        first: dict[int, str] = {}
        for name, v in self.names.items():
            first.setdefault(v, name)
        return first

    @cached_property
    def homes(self) -> Sequence[int]:
        """Value -> the value that stands for it and all that share a spec with it: itself where it is in no group."""
        homes = list(range(len(self.shapes)))

        def home(v: int) -> int:
            while homes[v] != v:
                v = homes[v]
            return v

        for group in self.groups:
            for v in group.members:
                a, b = home(group.members[0]), home(v)
                homes[max(a, b)] = min(a, b)
        return [home(v) for v in homes] if self.groups else homes

    def members(self, value: int) -> list[int]:
        """A value and all that share a spec with it, itself first."""
        tied = {v for group in self.groups for v in group.members if self.homes[v] == self.homes[value]}
        return [value, *sorted(tied - {value})]

    def tied_at(self, a: int, b: int) -> Site:
        """Where two values of one group were tied; where one of them was, if that took several groups."""
        found = [group for group in self.groups if a in group.members]
        return next((group.site for group in found if b in group.members), found[0].site if found else ())

    def source(self, value: int) -> str:
        """The user's line that makes a value; empty for arguments."""
        return line(self.sites[value])


def merged(a: Spec, b: Spec) -> Spec | None:
    """Both annotations in one where each dim is said by one of them only, or by both alike; else None."""
    dims = []
    for x, y in zip(a.dims, b.dims, strict=True):
        if x == y:
            dims.append(x if x.via else y)
        elif y.open and not y.axes:
            dims.append(x)
        elif x.open and not x.axes:
            dims.append(y)
        else:
            return None
    used = [axis for d in dims for axis in d.axes]
    return Spec(dims=tuple(dims)) if len(set(used)) == len(used) else None


def joined(have: Pin, pin: Pin) -> Pin | None:
    """Two annotations of one value as one that names both origins; None where they contradict each other."""
    both = merged(have.spec, pin.spec)
    if both is None:
        return None
    says_more = have.spec != both or any(a.via != b.via for a, b in zip(have.spec.dims, both.dims, strict=True))
    origins = [*have.origin.split("; "), *([pin.origin] if says_more else [])]
    return Pin(spec=both, origin="; ".join(dict.fromkeys(origins)))
