"""Where unnamed values are computed: the module, as the name stack has it, and the source line."""

from __future__ import annotations

import difflib
import os
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeVar

from .. import compat
from ..paths import Glob
from .graph import Graph, Op, Site, line

_Of = TypeVar("_Of")
_TRANSFORMED = re.compile(r"\w+\(|\)")
_LINE = re.compile(r"(?P<file>[^:]*[^:/]):(?P<number>\d+)")
_NUMBERED = re.compile(r"(?P<op>.+?)(?:#(?P<number>\d+))?")
Phase = Literal["forward", "recomputed", "backward"]
"""When a value is computed: by the program as written, anew for the backward pass, or by the backward pass alone."""
_HIDDEN: tuple[Phase, ...] = ("recomputed", "backward")
"""After a place, as `model.py:123/recomputed`: what is computed there then."""
_REMATTED = "rematted_computation"
_OWN_SCOPES = frozenset({"checkpoint", _REMATTED})


def op_name(op: Op) -> str:
    """The op's name; at the edge of a loop or branch, the name of that loop or branch."""
    if op.name != "edge":
        return op.name
    return op.site[0].primitive.name if op.site else ""


def scope(site: Site) -> tuple[str, Phase]:
    """The name scope in which a value is computed, and when."""
    stacks = [compat.name_stack(eqn) for eqn in reversed(site)]
    parts = [part for stack in stacks for part in _TRANSFORMED.sub("", stack).split("/")]
    phase: Phase = "backward" if any("transpose(" in stack for stack in stacks) else "forward"
    if phase == "backward" and _REMATTED in parts:
        phase = "recomputed"
    # Without `einsum`'s scopes, which repeat its formula: the source line is more useful.
    return "/".join(part for part in parts if part and part not in _OWN_SCOPES and "->" not in part), phase


def is_of_recomputed(name: str) -> bool:
    """Whether a name is of what is computed anew for the backward pass, which depends on what blocks keep for it."""
    return "/recomputed/" in name


@dataclass(frozen=True, slots=True)
class Place:
    """Where one value is computed."""

    scope: str
    phase: Phase
    file: str
    number: int
    """Of the line; -1 if it is unknown."""
    op: str


class Places:
    """The places of the values that ops compute."""

    def __init__(self, graph: Graph):
        self.graph = graph

    @cached_property
    def _places(self) -> dict[int, Place]:
        found: dict[int, Place] = {}
        inputs = set(self.graph.inputs)
        cached: dict[tuple[int, ...], tuple[str, Phase, str, int]] = {}
        for op in self.graph.ops:
            key = tuple(map(id, op.site))
            if key not in cached:
                name, phase = scope(op.site)
                file, _, number = line(op.site).partition(" ")[0].rpartition(":")
                cached[key] = name, phase, file, int(number) if number.isdigit() else -1
            own = op_name(op)
            if own:
                found.update((v, Place(*cached[key], own)) for v in op.results if v not in inputs)
        return found

    @cached_property
    def _on_lines(self) -> Mapping[tuple[str, int], list[int]]:
        """File and line -> the values computed there, in program order."""
        found: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        for v, place in self._places.items():
            found[place.file, place.number].append(v)
        return found

    @cached_property
    def scopes(self) -> tuple[str, ...]:
        """All scopes with ops, in program order."""
        return tuple(dict.fromkeys(place.scope for place in self._places.values() if place.scope))

    def find(self, name: str) -> dict[str, int]:
        """Unique name -> value of what is computed at a place; empty if there is no such place.

        A place alone stands for its results: what is computed there and read elsewhere. Forward ops hide those that
        are recomputed at the same place and those of the backward pass: these are at `model.py:123/recomputed` and
        `model.py:123/backward`.

        Args:
            name: a module of the name stack, or the end of one, as `decoder/layer_0/mlp`; a line, as `model.py:123`; or
                one of the two and an op there, as `model.py:123/dot_general`, with `#1` for the second such op.
        """
        here, is_here = self._at(name)
        if here:
            return self._named(name, here, self._results(here, is_here))
        place, _, last = name.rpartition("/")
        numbered = _NUMBERED.fullmatch(last)
        if not place or numbered is None:
            return {}
        here, _ = self._at(place)
        found = [v for v in here if self._places[v].op == numbered["op"]]
        if numbered["number"] is None:
            return self._named(place, here, found)
        k = int(numbered["number"])
        return {name: found[k]} if k < len(found) else {}

    def of(self, v: int) -> str:
        """The line and op that compute a value, as `find` takes them; empty if unknown."""
        place = self._places.get(v)
        if place is None or place.number < 0:
            return ""
        phase = f"/{place.phase}" if place.phase in _HIDDEN else ""
        return f"{place.file}:{place.number}{phase}/{place.op}"

    def without_kept(self, found: Mapping[str, _Of]) -> dict[str, _Of]:
        """What is given by name, without what other programs recompute and this one keeps."""
        return {name: one for name, one in found.items() if not is_of_recomputed(name) or self.find(name)}

    def near(self, name: str) -> list[str]:
        """The modules with a similar name; for a line without ops, the nearest lines of its file that have some."""
        found = _LINE.fullmatch(name)
        if found is None:
            return difflib.get_close_matches(name, self.scopes, n=3, cutoff=0.6)
        file, number = os.path.basename(found["file"]), int(found["number"])
        lines = {place.number for place in self._places.values() if place.file == file}
        return [f"{file}:{one}" for one in sorted(lines, key=lambda one: abs(one - number))[:3]]

    def _at(self, name: str) -> tuple[list[int], Callable[[Place], bool]]:
        """The values computed at a place, those of the forward pass if there are any, and whether others are there."""
        here, test = self._all_at(name)
        place, _, phase = name.rpartition("/")
        if not here and phase in _HIDDEN:
            here, test = self._all_at(place)
            return [v for v in here if self._places[v].phase == phase], test
        forward = [v for v in here if self._places[v].phase == "forward"]
        return forward or here, test

    def _all_at(self, name: str) -> tuple[list[int], Callable[[Place], bool]]:
        """The values computed at the line or in the module of that name, and whether others are."""
        found = _LINE.fullmatch(name)
        if found is not None:
            file, number = os.path.basename(found["file"]), int(found["number"])
            here = self._on_lines.get((file, number), [])
            return here, lambda place: place.file == file and place.number == number
        glob = Glob(name)
        inside = {one for one in self.scopes if any(map(glob.matches, _enclosing(one)))}
        return [v for v, place in self._places.items() if place.scope in inside], lambda place: place.scope in inside

    def _results(self, values: Sequence[int], is_here: Callable[[Place], bool]) -> list[int]:
        """The values that are read elsewhere than where they are computed, or returned; all if none is."""
        outputs = set(self.graph.outputs)

        def leaves(v: int) -> bool:
            readers = (w for op in self.graph.users.get(v, ()) for w in op.results)
            return v in outputs or any(w not in self._places or not is_here(self._places[w]) for w in readers)

        return [v for v in values if leaves(v)] or list(values)

    def _named(self, place: str, here: Sequence[int], values: Sequence[int]) -> dict[str, int]:
        """Values by place and op; ops that occur there several times are numbered in program order."""
        all_of_op: defaultdict[str, list[int]] = defaultdict(list)
        for v in here:
            all_of_op[self._places[v].op].append(v)
        found = {}
        for v in values:
            own = all_of_op[self._places[v].op]
            number = f"#{own.index(v)}" if len(own) > 1 else ""
            found[f"{place}/{self._places[v].op}{number}"] = v
        return found


def _enclosing(name: str) -> list[str]:
    parts = name.split("/")
    return ["/".join(parts[: k + 1]) for k in range(len(parts))]
