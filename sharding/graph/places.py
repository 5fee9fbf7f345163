"""Where unnamed values are computed: the module, by the name stack or by its parameters, and the source line."""

from __future__ import annotations

import difflib
import os
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal, TypeVar

from .. import compat
from ..paths import Glob
from .graph import Graph, Op, Site
from .modules import ParameterModules, enclosing

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
    path: str
    """Of the source file; empty if it is unknown."""
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
                lines = [compat.source_file(eqn.source_info) for eqn in op.site]
                path, number = next((one for one in lines if one[0]), ("", -1))
                cached[key] = name, phase, path, number
            own = op_name(op)
            if own:
                found.update((v, Place(*cached[key], own)) for v in op.results if v not in inputs)
        return found

    @cached_property
    def _on_lines(self) -> Mapping[tuple[str, int], list[int]]:
        """Name of a file and line -> the values computed there, in program order."""
        found: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        for v, place in self._places.items():
            found[os.path.basename(place.path), place.number].append(v)
        return found

    @cached_property
    def _files(self) -> Mapping[str, str]:
        """Path of a source file -> the shortest end of it that no other has."""
        paths = {place.path for place in self._places.values()}
        files = Counter(end for path in paths for end in _ends(path))
        return {path: next((end for end in _ends(path) if files[end] == 1), path) for path in paths}

    @cached_property
    def _modules(self) -> ParameterModules:
        return ParameterModules(self.graph, [v for v, place in self._places.items() if place.phase != "forward"])

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
            name: a module, or the end of one, as `decoder/layer_0/mlp`: of the name stack, or else the path of
                parameters that ops read; a line, as `model.py:123` or `nn/model.py:123`; or one of the two and an op
                there, as `model.py:123/dot_general`, with `#1` for the second such op.
        """
        here, results = self._at(name)
        if here:
            return self._named(name, here, results)
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
        return f"{self._files[place.path]}:{place.number}{phase}/{place.op}"

    def without_kept(self, found: Mapping[str, _Of]) -> dict[str, _Of]:
        """What is given by name, without what other programs recompute and this one keeps."""
        return {name: one for name, one in found.items() if not is_of_recomputed(name) or self.find(name)}

    def near(self, name: str) -> list[str]:
        """The modules with a similar name; for a line without ops, the nearest lines of its file that have some."""
        found = _LINE.fullmatch(name)
        if found is None:
            return difflib.get_close_matches(name, [*self.scopes, *self._modules.own], n=3, cutoff=0.6)
        file, number = os.path.basename(found["file"]), int(found["number"])
        lines = {one for own, one in self._on_lines if own == file}
        return [f"{file}:{one}" for one in sorted(lines, key=lambda one: abs(one - number))[:3]]

    def _at(self, name: str) -> tuple[list[int], list[int]]:
        """The values computed at a place, of the forward pass if there are any, and which of them are its results."""
        all_here = self._all_at(name)
        here = [v for v in all_here if self._places[v].phase == "forward"] or all_here
        place, _, phase = name.rpartition("/")
        if not here and phase in _HIDDEN:
            all_here = self._all_at(place)
            here = [v for v in all_here if self._places[v].phase == phase]
        if here:
            return here, self._results(here, all_here)
        instances = [[v for v in values if v in self._places] for values in self._modules.instances(name)]
        results = (v for values in instances for v in self._modules.results(values))
        inside = {v for values in instances for v in values}
        return [v for v in self._places if v in inside], [*dict.fromkeys(results)]

    def _all_at(self, name: str) -> list[int]:
        """The values computed at the line, or in the module of the name stack, of that name."""
        found = _LINE.fullmatch(name)
        if found is not None:
            here = self._on_lines.get((os.path.basename(found["file"]), int(found["number"])), [])
            exact = [v for v in here if found["file"] in _ends(self._places[v].path)]
            return exact or here
        glob = Glob(name)
        inside = {one for one in self.scopes if any(map(glob.matches, enclosing(one)))}
        return [v for v, place in self._places.items() if place.scope in inside] if inside else []

    def _results(self, values: Sequence[int], all_here: Collection[int]) -> list[int]:
        """The values that are read elsewhere than where they are computed, or returned; all if none is."""
        outputs, inside = set(self.graph.outputs), set(all_here)

        def leaves(v: int) -> bool:
            readers = (w for op in self.graph.users.get(v, ()) for w in op.results)
            return v in outputs or any(w not in inside for w in readers)

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


@cache
def _ends(path: str) -> tuple[str, ...]:
    """The ends of a path that start at a folder or at the file, shortest first."""
    parts = path.split(os.sep)
    return tuple("/".join(parts[k:]) for k in reversed(range(len(parts))))
