"""Completions kept from one process to the next, in the cache on disk (`disk_cache.py`).

Kept are the spec of every value, which annotations count as storage, and what was searched for: how ops run, and chains
of reshards. A program that is found again, by its digest, is neither propagated nor searched. Tracing it and building
its graph is not saved, as with `jax.jit`. Nor are reasons and conflicts kept: `.why` and `.conflicts` propagate when
they are first asked for, with the same result.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from ..graph import Annotation, Graph
from ..propagation import Assignment, Given, Policy
from ..rewrite.op_strategy import OpStrategy
from ..rewrite.reshard import Step
from ..spec import Axis, Dim, MeshSizes, Spec
from . import disk_cache
from .program_digest import digest

FRACTION = 0.1
"""Of `jax_persistent_cache_min_compile_time_secs`, the least time that a completion takes to be kept. It takes a small
fraction of the time to compile the program, and its entry of the space."""

_log = logging.getLogger("sharding")


class SavedCompletion:
    """The entry of one program on disk."""

    def __init__(self, key: str, assignment: Assignment, seconds: float, num_searches: int):
        self.key, self.assignment = key, assignment
        self._seconds = seconds
        self._num_saved = num_searches

    @staticmethod
    def of(
        graph: Graph,
        sizes: MeshSizes,
        mesh: Mesh | AbstractMesh,
        *,
        platform: str,
        policy: Policy,
        complete: Callable[[], Assignment],
        function: str,
    ) -> SavedCompletion | None:
        """The completion of a program, restored or made now; None if JAX's cache is off.

        Args:
            graph: the annotated program.
            sizes: of the mesh axes.
            mesh: the mesh.
            platform: to lower for.
            policy: of the propagation.
            complete: makes the completion.
            function: the name of the program.
        """
        if disk_cache.directory() is None:
            return None
        key = digest(graph, sizes, mesh, platform, policy)
        entry = disk_cache.read(key)
        if entry is not None:
            try:
                found = _restored(entry, graph, sizes, Given(graph.annotations, policy, platform), complete)
            except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
                disk_cache.report_unusable(key, error)
            else:
                _log.debug("%s: completion restored from %s", function, disk_cache.directory())
                return SavedCompletion(key, found, float("inf"), len(found.searches))
        begun = time.perf_counter()
        made = complete()
        saved = SavedCompletion(key, made, time.perf_counter() - begun, -1)
        saved.update()
        return saved

    def update(self) -> None:
        """Writes what was found since the entry was written, if anything and if it is worth it."""
        least = FRACTION * jax.config.jax_persistent_cache_min_compile_time_secs  # pyright: ignore[reportAttributeAccessIssue]
        num_searches = len(self.assignment.searches)
        if num_searches > self._num_saved and self._seconds >= least:
            disk_cache.write(self.key, _entry(self.assignment))
            self._num_saved = num_searches


def _entry(assignment: Assignment) -> dict[str, Any]:
    table = _Table()
    stored = {
        str(v): [[dim.priority, dim.is_stored] for dim in annotation.spec.dims]
        for v, annotation in assignment.graph.annotations.items()
        if any(dim.is_stored for dim in annotation.spec.dims)
    }
    values = [table(spec) for spec in assignment.specs]
    searches = {text: _encoded(found, table) for text, found in [*assignment.searches.items()]}
    return {"values": values, "stored": stored, "searches": searches, "specs": table.rows()}


def _restored(
    entry: Mapping[str, Any], graph: Graph, sizes: MeshSizes, given: Given, complete: Callable[[], Assignment]
) -> Assignment:
    """The completion of an entry. Raises some error if the entry is not one of this program."""
    table = [_spec(row) for row in entry["specs"]]
    specs = tuple([table[number] for number in entry["values"]])
    if [len(spec.dims) for spec in specs] != [*map(len, graph.shapes)]:
        raise ValueError("its values have other numbers of dims")
    stored = {int(v): _stored(graph.annotations[int(v)], dims) for v, dims in entry["stored"].items()}
    made_anew = functools.cache(complete)
    return Assignment(
        graph=graph.with_annotations(stored) if stored else graph,
        sizes=sizes,
        specs=specs,
        find_reason=lambda value, dim, axis: made_anew().find_reason(value, dim, axis),
        with_annotations=lambda annotations: made_anew().with_annotations(annotations),
        find_conflicts=lambda: made_anew().find_conflicts(),
        given=given,
        searches={text: _decoded(row, table) for text, row in entry["searches"].items()},
    )


def _stored(annotation: Annotation, dims: Sequence[Any]) -> Annotation:
    pairs = zip(annotation.spec.dims, dims, strict=True)
    changed = (dataclasses.replace(dim, priority=priority, is_stored=stored) for dim, (priority, stored) in pairs)
    return dataclasses.replace(annotation, spec=dataclasses.replace(annotation.spec, dims=tuple(changed)))


class _Table:
    """Specs by number."""

    def __init__(self) -> None:
        self.numbers: dict[Spec, int] = {}

    def __call__(self, spec: Spec) -> int:
        return self.numbers.setdefault(spec, len(self.numbers))

    def rows(self) -> list[Any]:
        """What `_spec` makes the specs of."""
        return [[[[dim.axes, dim.open, dim.priority] for dim in spec.dims], spec.unreduced] for spec in self.numbers]


def _spec(row: Sequence[Any]) -> Spec:
    dims, unreduced = row
    return Spec(
        dims=tuple(Dim(axes=_axes(axes), open=is_open, priority=priority) for axes, is_open, priority in dims),
        unreduced=_axes(unreduced),
    )


def _axes(row: Sequence[Any]) -> tuple[Axis, ...]:
    return tuple(axis if isinstance(axis, str) else (axis[0], axis[1], axis[2]) for axis in row)


def _encoded(found: OpStrategy | tuple[Step, ...], table: _Table) -> Any:
    if isinstance(found, tuple):
        return [_steps(found, table)]
    steps = [[_steps(one, table) for one in side] for side in (found.operand_steps, found.result_steps)]
    specs = [[*map(table, side)] for side in (found.operand_specs, found.result_specs, found.needed)]
    return [*steps, *specs, found.constrained, found.cost, found.is_cut_short]


def _decoded(row: Sequence[Any], table: Sequence[Spec]) -> OpStrategy | tuple[Step, ...]:
    if len(row) == 1:
        return _read_steps(row[0], table)
    operand_steps, result_steps, operand_specs, result_specs, needed, constrained, cost, is_cut_short = row
    return OpStrategy(
        operand_steps=tuple(_read_steps(one, table) for one in operand_steps),
        operand_specs=tuple(table[k] for k in operand_specs),
        result_specs=tuple(table[k] for k in result_specs),
        result_steps=tuple(_read_steps(one, table) for one in result_steps),
        constrained=tuple(constrained),
        cost=cost,
        is_cut_short=is_cut_short,
        needed=tuple(table[k] for k in needed),
    )


def _steps(steps: Sequence[Step], table: _Table) -> list[Any]:
    return [[s.kind, s.axes, table(s.spec), int(s.num_bytes), int(s.wire_bytes), s.byte_cost, s.is_sum] for s in steps]


def _read_steps(rows: Sequence[Any], table: Sequence[Spec]) -> tuple[Step, ...]:
    return tuple(
        Step(
            kind=kind,
            axes=_axes(axes),
            spec=table[spec],
            num_bytes=num_bytes,
            wire_bytes=wire_bytes,
            byte_cost=byte_cost,
            is_sum=is_sum,
        )
        for kind, axes, spec, num_bytes, wire_bytes, byte_cost, is_sum in rows
    )
