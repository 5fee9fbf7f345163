"""`Completion`: the inferred sharding of a program, inspected before anything compiles."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from jax.sharding import PartitionSpec as P

from . import paths
from .cost import Topology
from .cost.topology import topology_of_sizes
from .display import Drawing, Table
from .display.text_table import ruled
from .errors import ShardingError
from .explain import (
    CompileTime,
    Estimate,
    Ledger,
    Lock,
    MemoryReport,
    Verification,
    boundary_shardings,
    communication,
    compile_time,
    estimate,
    explicit_shardings,
    memory,
    pickling,
    value_list,
    verify,
)
from .explain import report as reports
from .explain.conflict_list import Conflicts
from .explain.explicit_shardings import ExplicitShardings
from .explain.replication_reasons import ReplicatedDims
from .explain.suggestions import Suggestions, suggestions
from .explain.unknown_ops import UnknownOps, unknown_ops
from .explain.why import Why, why
from .graph import Places, Trips
from .hardware import Chip, Devices, Platform
from .propagation import Assignment, PendingSum, partial_sums
from .propagation.added_annotation import with_annotations
from .spec import Spec, sizes_text, to_partition_spec

Hardware = Devices | Chip | str | None
MAX_DISPLAYED_OPS = 10_000
"""From this many ops on, displaying a completion omits memory and time, which would take seconds."""


class Completion:
    """The sharding of every array of a program over a mesh, with the reasons.

    Prints as a table of arguments, results and named values. `assignment` covers all values.
    """

    def __init__(
        self,
        assignment: Assignment,
        *,
        name: str,
        in_trees: Sequence[Any],
        out_tree: Any,
        donated: Sequence[int] = (),
        platform: Platform = "cpu",
        devices: Devices | None = None,
    ):
        self.assignment = assignment
        self.name = name
        self._in_trees, self._out_tree = tuple(in_trees), out_tree
        self.donated_leaves = tuple(donated)
        """Indices of the donated arrays, of all arrays in the arguments."""
        self._platform: Platform = platform
        self._devices = devices

    def __getstate__(self) -> bytes:
        given = {k: v for k, v in vars(self).items() if not isinstance(vars(Completion).get(k), cached_property)}
        return pickling.dumps(given)

    def __setstate__(self, state: bytes) -> None:
        vars(self).update(pickling.loads(state))

    @property
    def _graph(self):
        return self.assignment.graph

    @property
    def in_shardings(self) -> tuple[Any, ...]:
        """PartitionSpecs of the arguments: one pytree per argument, with its structure.

        An argument in the host's memory has a `NamedSharding`, which names its kind of memory, on the current mesh.
        """
        return boundary_shardings.of_arguments(self.assignment, self._in_trees)

    @property
    def out_shardings(self) -> Any:
        """PartitionSpecs of the result, a pytree with its structure; as for arguments in the host's memory."""
        return boundary_shardings.of_result(self.assignment, self._out_tree)

    def boundary(self, value: int) -> P:
        """The PartitionSpec of an argument or result, limited to axes that divide its dims."""
        spec = self.assignment.boundary_spec(value)
        return to_partition_spec(spec)

    @property
    def conflicts(self) -> Conflicts:
        """Conflicts: pairs of shardings that one op cannot satisfy together."""
        return Conflicts(self.assignment.conflicts, self._graph.layers)

    @cached_property
    def unreduced(self) -> tuple[PendingSum, ...]:
        """Pending sums over mesh axes: where each is produced, and the op that first needs the full sum.

        XLA reduces where the value is produced; if a later value is smaller, reducing that one is cheaper.
        """
        a = self.assignment
        return partial_sums.find(a.graph, a.specs, a.sizes)

    @cached_property
    def unknown(self) -> UnknownOps:
        """The ops without a rule, each with its line and the operands that are gathered for it.

        Shardings do not propagate through these.
        """
        return unknown_ops(self.assignment)

    @property
    def uneven(self) -> tuple[str, ...]:
        """Named values with an uneven inferred sharding: limited at arguments and results, padded elsewhere."""
        return self.assignment.uneven

    def value(self, name: str) -> int:
        """The index of a value, by a name as for `spec`."""
        return paths.find(self._graph.names, name, lambda v: str(self.assignment.specs[v]), self._places)

    @cached_property
    def _places(self) -> Places:
        return Places(self._graph)

    def spec(self, name: str) -> P:
        """The PartitionSpec of a value.

        Args:
            name: a path such as `state/params/blocks/0/mlp/w1`, the end of one, a glob such as `*/w1`, or a name given
                to `annotate`. An unnamed value is found by the module that computes it, `decoder/layer_0/mlp` in the
                name stack or with parameters below that path, or by its line, `model.py:123`: what is computed there
                and read elsewhere. With an op, as in `decoder/layer_0/mlp/dot_general`, any value computed there.

        Raises:
            ShardingError: no such value, or several that are sharded differently, with the unique name of each.
        """
        v = self.value(name)
        return self.boundary(v) if v in self._ends else to_partition_spec(self.assignment.specs[v])

    @cached_property
    def _ends(self) -> frozenset[int]:
        return frozenset((*self._graph.inputs, *self._graph.outputs))

    def annotate(self, path: str, spec: P, *, priority: int = 0) -> Completion:
        """The completion with one more annotation.

        Args:
            path: as for `spec`; the end of several paths annotates all these values, and a module or a line all its
                results if they have one shape.
            spec: as for `sharding.annotate`.
            priority: 0 is propagated first; a higher number waits until all lower ones have converged.

        Raises:
            ShardingError: an invalid spec for this array, a conflict with an existing annotation, or, for an argument
                or result, a spec that does not divide it.

        The result equals that of a program with this annotation from the start. Faster than a new completion, but its
        cost still grows with the program.
        """
        found = paths.find_all(self._graph.names, path, self._places)
        shapes = {self._graph.shapes[v] for v in found.values()}
        if len(shapes) > 1 and not found.keys() <= self._graph.names.keys():
            candidates = {label: f"{list(self._graph.shapes[v])}" for label, v in found.items()}
            raise paths.ambiguous(path, candidates, "of different shapes")
        annotations = with_annotations(
            self._graph,
            found,
            spec,
            self.assignment.sizes,
            priority=priority,
            ends=self._ends,
            asked=f"{self.name}: annotate({path!r}, {spec})",
        )
        return self._of(self.assignment.with_annotations(annotations))

    def with_trips(self, trips: Trips) -> Completion:
        """The completion with trip counts for loops of unknown length (`while_loop`), which count as one iteration.

        Args:
            trips: how often they run: all of them, or each by the start of its line, as `{"decode.py:31": 64}`.

        Raises:
            ShardingError: a negative count, or a line at which there is no such loop.

        The ledger and the estimate then count all iterations; peak memory is that of any number.
        """
        return self._of(self.assignment.with_trips(trips))

    def _of(self, assignment: Assignment) -> Completion:
        return Completion(
            assignment,
            name=self.name,
            in_trees=self._in_trees,
            out_tree=self._out_tree,
            donated=self.donated_leaves,
            platform=self._platform,
            devices=self._devices,
        )

    def explicit(self) -> ExplicitShardings:
        """What to write to run this program with Explicit axes, sharded as it is here.

        One entry per sharding that JAX does not derive from the operands: the line, the op, the spec, and whether it is
        an `out_sharding=` or a `jax.sharding.reshard`.
        """
        return explicit_shardings.missing(self.assignment)

    def communication(self) -> Ledger:
        """Predicts the collectives of one call, each with the source line and the cause, before anything compiles.

        In logical dtypes; `.lowered("cpu")` gives them as that platform's compiler emits them. What it cannot predict,
        such as a `custom_partitioning` without a rule, is listed under the table (`.unknown`).
        """
        return communication(self.assignment, name=self.name)

    def estimate(self, hardware: Hardware = None) -> Estimate:
        """Estimates the time of one call in seconds, with a breakdown, before anything compiles.

        Args:
            hardware: devices such as `"v5p:4x8x8"`, a chip such as `"h100"`, or the path of a table written by
                `sharding calibrate`. Default: the devices of the current mesh, or of the mesh of this completion.

        Raises:
            ShardingError: unknown devices, or another number of them than in the mesh.
        """
        return estimate(self.assignment, self._topology(hardware), name=self.name)

    def compile_time(self, *, platform: Platform | None = None) -> CompileTime:
        """Estimates how long XLA takes to compile the program: seconds, tens of seconds or minutes.

        Names unrolled layers that are equal, of which a `scan` compiles one.

        Args:
            platform: the compiler, `"cpu"`, `"gpu"` or `"tpu"`. Default: that of the mesh.
        """
        return compile_time(self._graph, platform or self._platform)

    def _topology(self, hardware: Hardware) -> Topology:
        """The mesh with its devices and links."""
        return topology_of_sizes(self.assignment.sizes, hardware, self._devices)

    def _known_topology(self, hardware: Hardware) -> Topology | None:
        """The same; None if none are given and the mesh's own devices are unknown."""
        try:
            return self._topology(hardware)
        except ShardingError:
            if hardware is not None:
                raise
            return None

    def suggest(self, limit: int = 3, hardware: Hardware = None) -> Suggestions:
        """The single annotations that would save most, each with the costs of the program that has it.

        Tried are other specs of arguments, and of arrays that conflicts and replication make costly; equal layers are
        annotated together. Nothing compiles; takes some seconds.

        Args:
            limit: how many, at most.
            hardware: as for `estimate`; without known devices, times are 0.

        Raises:
            ShardingError: hardware that does not fit the mesh.
        """
        on = self._known_topology(hardware)
        return suggestions(self.assignment, self._of, on, self.donated_leaves, self._platform, limit=limit)

    def report(self, path: str | os.PathLike[str], hardware: Hardware = None, *, tables: Sequence[Table] = ()) -> Path:
        """Writes a self-contained HTML report; returns its path.

        It shows the mesh, the sharding of every value with the chain of reasons for each axis, the collectives, memory
        over a step, and the step time. Takes about a second for a scanned model, half a minute for a hundred unrolled
        layers.

        Args:
            path: of the file.
            hardware: as for `estimate`; without known devices, times are omitted.
            tables: further ones to show, such as those of a `planner.Plan`.

        Raises:
            ShardingError: hardware that does not fit the mesh.
        """
        found = Path(path)
        found.write_text(reports.page(self._contents(hardware, tables=tables)), encoding="utf-8")
        return found

    def _contents(self, hardware: Hardware = None, **options: Any) -> dict[str, Any]:
        return reports.contents(
            self.assignment,
            name=self.name,
            donated=self.donated_leaves,
            platform=self._platform,
            on=self._known_topology(hardware),
            **options,
        )

    def verify(self, compiled: Any) -> Verification:
        """Compares predictions with the compiled program: collectives by kind, and peak memory.

        Args:
            compiled: the result of `step.lower(...).compile()` for the same arguments and mesh.
        """
        on = self._known_topology(None)
        return verify(self.communication().lowered(on.chip if on else self._platform), self.memory(), compiled)

    def locked(self) -> Lock:
        """The content of the lock file."""
        return Lock.of(self.assignment.sizes, [row[:3] for row in self.rows()], self.communication(), self.memory())

    def lock(self, path: str | os.PathLike[str]) -> None:
        """Writes the mesh, specs of named values, collectives by kind and peak bytes to a small JSON file.

        Under version control and checked by `sharding.check_lock`, it detects changes of the program that change its
        sharding or costs.
        """
        Path(path).write_text(self.locked().text())

    def diff(self, other: Completion) -> tuple[str, ...]:
        """Differences to another completion, line by line: mesh, specs, collectives, peak memory."""
        return self.locked().diff(other.locked())

    def memory(self, *, platform: Platform | None = None) -> MemoryReport:
        """Predicts peak memory per device during one call, in bytes, before anything compiles.

        Args:
            platform: the compiler to model, `"cpu"`, `"gpu"` or `"tpu"`. Default: that of the mesh.
        """
        platform = platform or self._platform
        return memory(self.assignment, name=self.name, donated=self.donated_leaves, platform=platform)

    @cached_property
    def _replicated_dims(self) -> ReplicatedDims:
        return ReplicatedDims(self.assignment)

    def why(self, name: str, dim: int | None = None) -> Why:
        """The chain of reasons for each axis of a value, back to the annotation it came from.

        Args:
            name: as for `spec`.
            dim: the dim to explain. Default: all.
        """
        return why(self.assignment, self._replicated_dims, name, self.value(name), dim)

    def rows(self) -> list[tuple[str, str, str, str]]:
        """(name, shape, spec, reason) of every named value; equal layers share a row."""
        return value_list.rows(self.assignment)

    def draw(self, *names: str) -> Drawing:
        """Arrays drawn as rectangles, cut by the mesh axes that shard them.

        An SVG in notebooks; `print` draws in characters.

        Args:
            names: as for `spec`. Default: every named value, equal layers once.

        Raises:
            ShardingError: no such value, or several that are sharded differently.
        """
        values = {name: self.value(name) for name in names} or value_list.first_of_layers(self._graph)
        return value_list.drawing(self.assignment, values)

    def __str__(self) -> str:
        mesh = sizes_text(self.assignment.sizes)
        head = f"{self.name} on mesh {mesh}: {len(self._graph.shapes)} values, {len(self._graph.ops)} ops"
        table = [("value", "shape", "spec", "reason"), *self.rows()]
        notes = value_list.notes(self.assignment, self.conflicts, self._platform)
        return "\n".join([head, *ruled(table), *notes])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return reports.frame(self._contents(with_costs=len(self._graph.ops) < MAX_DISPLAYED_OPS))

    def num_bytes(self, value: int, spec: Spec) -> int:
        """Bytes of a value on one device under a spec."""
        return self._graph.num_bytes(value) // spec.num_shards(self.assignment.sizes)
