"""`Completion`: what a user holds after the pass, before anything compiles."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from . import logical, paths
from .columns import ruled
from .cost import Topology, topology
from .errors import ShardingError, raise_together
from .explain import Estimate, Ledger, Lock, MemoryReport, Verification, communication, estimate, memory, verify
from .explain import report as reports
from .explain.whole import Wholes
from .graph import Pin, joined
from .hardware import Chip, Devices, Platform
from .mesh import current
from .propagation import Assignment, PendingSum, pending
from .spec import Spec, axis_name, divisible, indivisible, sizes_text, to_partition_spec
from .why import Conflicts, Why, way

LONG = 10_000
"""Ops from which memory and time are left out where a completion is merely displayed: they would take seconds."""


class Completion:
    """How every array of a program is split over a mesh, and why.

    Prints as a table of arguments, results and named values. `assignment` holds every value.
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
        self._donated = tuple(donated)
        self._platform: Platform = platform
        self._devices = devices

    @property
    def _graph(self):
        return self.assignment.graph

    @property
    def in_shardings(self) -> tuple[Any, ...]:
        """Per argument a pytree like it, of PartitionSpecs."""
        specs = [self.boundary(v) for v in self._graph.inputs]
        trees, at = [], 0
        for tree in self._in_trees:
            trees.append(jax.tree.unflatten(tree, specs[at : at + tree.num_leaves]))
            at += tree.num_leaves
        return tuple(trees)

    @property
    def out_shardings(self) -> Any:
        """A pytree like the result, of PartitionSpecs."""
        return jax.tree.unflatten(self._out_tree, [self.boundary(v) for v in self._graph.outputs])

    def boundary(self, value: int) -> P:
        """The PartitionSpec of an argument or result: what of its spec divides its dims."""
        spec = divisible(self.assignment.specs[value], self._graph.shapes[value], self.assignment.sizes)
        return to_partition_spec(spec)

    @property
    def conflicts(self) -> Conflicts:
        """Where two claims met that one op can't have both."""
        return Conflicts(self.assignment.conflicts)

    @cached_property
    def unreduced(self) -> tuple[PendingSum, ...]:
        """Sums over mesh axes that are still to be done: where each is made, and the op that first needs it.

        XLA adds up where the value is made; where fewer bytes are needed later, a rewrite would pay.
        """
        a = self.assignment
        return pending.find(a.graph, a.specs, a.sizes)

    @property
    def unknown(self) -> dict[str, int]:
        """Primitives that have no rule, with the number of ops: nothing flowed through those."""
        return self._graph.unknown

    @property
    def uneven(self) -> tuple[str, ...]:
        """Named values whose inferred split doesn't divide them: cut at arguments and results, padded elsewhere."""
        return self.assignment.uneven

    def value(self, name: str) -> int:
        """The index of a value by path, end of path or annotated name."""
        return paths.find(self._graph.names, name, lambda v: str(self.assignment.specs[v]))

    def spec(self, name: str) -> P:
        """The PartitionSpec of an argument, result or annotated value.

        Args:
            name: `state/params/blocks/0/mlp/w1`, an end of it that is unique, or a name given to `annotate`.
        """
        v = self.value(name)
        return self.boundary(v) if v in self._ends else to_partition_spec(self.assignment.specs[v])

    @cached_property
    def _ends(self) -> frozenset[int]:
        return frozenset((*self._graph.inputs, *self._graph.outputs))

    def annotate(self, path: str, spec: P, *, priority: int = 0) -> Completion:
        """What would come of one more annotation: another completion, from the annotations of this one and this.

        Args:
            path: as for `spec`; of an end of several paths all the values are meant.
            spec: as for `sharding.annotate`.
            priority: 0 is propagated first; a higher number waits until all lower ones have settled.

        Raises:
            ShardingError: a spec that is none for this array or that contradicts an annotation which is there already;
                of an argument or result also one that doesn't divide it.

        The result is exactly that of a program annotated so from the start. It is quick, but costs a share of the first
        completion, which grows with the program.
        """
        names = paths.find_all(self._graph.names, path)
        pins: dict[int, Pin] = {}
        failures: list[ShardingError] = []
        for name in names:
            try:
                pins[self._graph.names[name]] = self._pin(name, spec, priority)
            except ShardingError as error:
                failures.append(error)
        raise_together(f"{self.name}: annotate({path!r}, {spec})", failures)
        assignment = self.assignment.with_pins(pins)
        return Completion(
            assignment,
            name=self.name,
            in_trees=self._in_trees,
            out_tree=self._out_tree,
            donated=self._donated,
            platform=self._platform,
            devices=self._devices,
        )

    def _pin(self, name: str, spec: P, priority: int) -> Pin:
        """The annotation of a value once one more is added."""
        v, asked = self._graph.names[name], f"annotate({name!r}, {spec})"
        shape, sizes = self._graph.shapes[v], self.assignment.sizes
        pin = Pin(spec=logical.resolve(spec, shape, sizes, asked=asked, priority=priority), origin=asked)
        faults = indivisible(pin.spec, shape, sizes)
        if faults and v in self._ends:
            raise ShardingError(
                asked,
                there=[f"shape {shape}", *faults],
                must="the axes' sizes divide the dims of an argument or result",
            )
        have = self._graph.pins.get(v)
        both = pin if have is None else joined(have, pin)
        if both is None:
            assert have is not None
            raise ShardingError(
                asked,
                there=f"{to_partition_spec(have.spec, keep_open=True)} from {have.origin}",
                must="a value's annotations say the same of a dim, or all but one leave it open",
                fix="P.UNCONSTRAINED for the dims that are said already, or another program without that annotation",
            )
        return both

    def communication(self) -> Ledger:
        """Every collective that one call runs, with the line that causes it and why, before anything compiles.

        At logical dtypes; `.lowered("cpu")` is the same as that platform's compiler writes it. Of ops without a rule
        (`.unknown`) it is not known what XLA does.
        """
        return communication(self.assignment, name=self.name)

    def estimate(self, hardware: Devices | Chip | str | None = None) -> Estimate:
        """What one call takes, in seconds, and of what that is made; before anything compiles.

        Args:
            hardware: devices such as `"v5p:4x8x8"`, a chip such as `"h100"`, or the path of a table that
                `sharding calibrate` wrote. Those of the mesh in force, or that it was made on, if not given.

        Raises:
            ShardingError: nothing says what the devices are, or they are not as many as those of the mesh.
        """
        return estimate(self.assignment, self._topology(hardware), name=self.name)

    def _topology(self, hardware: Devices | Chip | str | None) -> Topology:
        """The mesh on its devices."""
        mesh = current()
        sizes = self.assignment.sizes
        if mesh is None or dict(mesh.shape) != dict(sizes):
            return topology(AbstractMesh(tuple(sizes.values()), tuple(sizes)), hardware or self._devices)
        return topology(mesh, hardware)

    def report(self, path: str | os.PathLike[str], hardware: Devices | Chip | str | None = None) -> Path:
        """Writes a page that shows all of this: one HTML file that needs no network and no other file.

        The mesh, every value with its split and the way of each axis, the collectives, what a device holds over a step
        and what a step takes; about a second for a scanned model, half a minute for a hundred unrolled layers.

        Args:
            path: of the file.
            hardware: as for `estimate`; where nothing says what the devices are, times are left out.

        Returns:
            The path of the file.

        Raises:
            ShardingError: the hardware that is given doesn't fit the mesh.
        """
        found = Path(path)
        found.write_text(reports.page(self._contents(hardware)), encoding="utf-8")
        return found

    def _contents(self, hardware: Devices | Chip | str | None = None, *, with_costs: bool = True) -> dict[str, Any]:
        try:
            on = self._topology(hardware)
        except ShardingError:
            if hardware is not None:
                raise
            on = None
        return reports.contents(
            self.assignment,
            name=self.name,
            donated=self._donated_leaves,
            platform=self._platform,
            on=on,
            with_costs=with_costs,
        )

    def verify(self, compiled: Any) -> Verification:
        """What was predicted beside what the compiled program does: collectives by kind, and the peak of memory.

        Args:
            compiled: what `step.lower(...).compile()` gave for the same arguments and mesh.
        """
        return verify(self.communication().lowered(self._platform), self.memory(), compiled)

    def locked(self) -> Lock:
        """What `lock` writes."""
        rows = [(name, shape, spec) for name, shape, spec, _ in self.rows()]
        return Lock.of(self.assignment.sizes, rows, self.communication(), self.memory())

    def lock(self, path: str | os.PathLike[str]) -> None:
        """Writes mesh, specs of named values, collectives by kind and peak bytes to a small JSON file.

        Kept under version control, and checked by `sharding.check_lock`, it tells when a change of the program changes
        how it runs.
        """
        Path(path).write_text(self.locked().text())

    def diff(self, other: Completion) -> tuple[str, ...]:
        """What another completion has that this one has not, line by line: mesh, specs, collectives, peak."""
        return self.locked().diff(other.locked())

    def memory(self, *, platform: Platform | None = None) -> MemoryReport:
        """What a device holds at the worst moment of one call, in bytes, before anything compiles.

        Args:
            platform: whose compiler is followed: `"cpu"`, whose figures the tests hold this against, or `"gpu"` or
                `"tpu"`, of which it is taken that they keep to the program's order. The mesh's own if not given.
        """
        donated = self._donated_leaves
        return memory(self.assignment, name=self.name, donated=donated, platform=platform or self._platform)

    @property
    def _donated_leaves(self) -> list[int]:
        """Which of the graph's inputs are donated."""
        ends = [0]
        for tree in self._in_trees:
            ends.append(ends[-1] + tree.num_leaves)
        return [leaf for i in self._donated for leaf in range(ends[i], ends[i + 1])]

    @cached_property
    def _wholes(self) -> Wholes:
        return Wholes(self.assignment)

    def why(self, name: str, dim: int | None = None) -> Why:
        """The way of each axis on a value (on one dim of it) from the annotation that it came from.

        Args:
            name: as for `spec`.
            dim: one dim; all of them if not given.
        """
        v = self.value(name)
        spec, ndim = self.assignment.specs[v], len(self._graph.shapes[v])
        if dim is not None and not -ndim <= dim < ndim:
            raise ShardingError(
                f"why({name!r}, dim={dim})", there=f"{ndim} dims: {self._graph.shapes[v]}", must=f"0 <= dim < {ndim}"
            )
        lines = [] if ndim else [f"{name} is a scalar"]
        for d in range(ndim) if dim is None else [dim % ndim]:
            if not spec.dims[d].axes:
                lines.append(f"{name} dim {d} is whole: {self._wholes.why(v, d)}")
            for axis in spec.dims[d].axes:
                lines.append(f"{name} dim {d} is split by {axis_name(axis)}:")
                lines += [f"  {line}" for line in way(self._graph, self.assignment.chain(v, d, axis))]
        return Why(tuple(lines))

    def word(self, value: int) -> str:
        """The reason of a value's split in a word or two: `annotated`, or the ops that brought its axes."""
        spec = self.assignment.specs[value]
        reasons = (self.assignment.reason(value, d, a) for d, dim in enumerate(spec.dims) for a in dim.axes)
        return ", ".join(dict.fromkeys(r.word for r in reasons if r is not None)) or "-"

    def rows(self) -> list[tuple[str, str, str, str]]:
        """(name, shape, spec, reason) of every named value once; layers that are alike share a row."""
        groups: dict[tuple[str, str, str, str], list[str]] = {}
        for v, name in self._graph.first_names.items():
            shape = "x".join(map(str, self._graph.shapes[v])) or "scalar"
            groups.setdefault((paths.pattern(name), shape, str(self.assignment.specs[v]), self.word(v)), []).append(
                name
            )
        return [(paths.starred(names), shape, spec, word) for (_, shape, spec, word), names in groups.items()]

    @property
    def num_tied(self) -> int:
        """How many results are split as the donated arguments whose place they take."""
        arguments = set(self._graph.inputs)
        return sum(v in arguments for v in self._graph.outputs)

    def __str__(self) -> str:
        mesh = sizes_text(self.assignment.sizes)
        head = f"{self.name} on mesh {mesh}: {len(self._graph.shapes)} values, {len(self._graph.ops)} ops"
        table = [("value", "shape", "spec", "reason"), *self.rows()]
        return "\n".join([head, *ruled(table), *self._notes()])

    __repr__ = __str__

    def _notes(self) -> list[str]:
        notes = []
        if self.num_tied:
            notes.append(f"{self.num_tied} results are split as the donated arguments whose place they take")
        if self.conflicts:
            lost = sum(c.bytes_lost for c in self.conflicts)
            notes.append(f"{len(self.conflicts)} conflicts, {lost} bytes per device not split as asked (.conflicts)")
        if self.unknown:
            notes.append("no rule for " + ", ".join(f"{k} (x{n})" for k, n in sorted(self.unknown.items())))
        notes += [f"uneven: {line}" for line in self.uneven[:8]]
        return notes

    def _repr_html_(self) -> str:
        return reports.frame(self._contents(with_costs=len(self._graph.ops) < LONG))

    def num_bytes(self, value: int, spec: Spec) -> int:
        """Bytes of a value on one device under a spec."""
        return self._graph.num_bytes(value) // spec.num_shards(self.assignment.sizes)
