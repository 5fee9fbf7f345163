"""The time that each op of a program takes on its device, found once for all ops of one kind that are sharded alike."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax

from ..cost import Topology, Work, op_seconds, work
from ..cost.op_time import is_compute_bound
from ..graph import Op
from ..propagation import Assignment
from ..rewrite.op_kind import op_kinds
from ..rewrite.op_strategy import OpStrategies
from ..spec import Spec, local_shape, num_parts
from .fused_ops import FUSED, NO_WORK, never_stored, read_by_siblings, slice_passes

EQUAL_WORK = FUSED | {"dot_general"}
"""Ops whose work follows from their rule and their arrays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRun:
    """All runs of an op on one device."""

    seconds: float
    limit: str
    """What takes longest: `compute` or `memory`."""
    matmul_flops: float


class OpRuns:
    """The runs of a program's ops.

    Args:
        assignment: the program.
        on: the devices.
        strategies: of its ops.
    """

    def __init__(self, assignment: Assignment, on: Topology, strategies: OpStrategies):
        self.assignment, self.graph, self.on, self.strategies = assignment, assignment.graph, on, strategies
        graph, platform = self.graph, on.chip.platform
        self.fused = never_stored(graph, platform)
        self.read_before, self.passes = read_by_siblings(graph, platform), slice_passes(graph, platform)
        self.kinds, sizes = op_kinds(graph), dict(assignment.sizes)
        self.works = graph.once(f"works on {platform} with {sizes}", dict[tuple, Work])
        self.numbers = graph.once(f"numbers of works on {platform}", dict[int, int])
        """Op, by id -> a number that it shares with those whose work is the same where they are sharded alike."""
        self.numbers_of_kinds = graph.once(f"kinds of works on {platform}", dict[tuple, int])
        self.known: dict[tuple[int, int, int], OpRun] = {}
        """By that number, the id of a strategy, and how often ops run."""

    def of(self, op: Op) -> OpRun | None:
        """The runs of an op; None if it does nothing."""
        if passes := self.passes.get(id(op)):
            v = op.results[0] if op.name == "scan xs" else op.operands[0]
            num_bytes = math.prod(self.local(v, self.assignment.specs[v]).shape) * self.graph.itemsize(v)
            return self.timed(op, Work(flops=0, read_bytes=passes * num_bytes, written_bytes=0))
        if op.name in NO_WORK or not op.site:
            return None
        number = self.numbers.get(id(op))
        if number is None:
            known = self.numbers_of_kinds
            number = self.numbers[id(op)] = known.setdefault(self.kind_of_work(op), len(known))
        if op.rule is None:
            specs = [self.assignment.specs[v] for v in (*op.operands, *op.results)]
            return self.timed(op, self.work(op, number, specs))
        strategy = self.strategies.of(op)
        key = number, id(strategy), op.times
        found = self.known.get(key)
        if found is None:
            done = self.work(op, number, (*strategy.operand_specs, *strategy.result_specs))
            found = self.known[key] = self.timed(op, done)
        return found

    def kind_of_work(self, op: Op) -> tuple:
        """Equal for ops whose work is the same where they are sharded alike."""
        if op.rule is None or op.name not in EQUAL_WORK:
            return (id(op),)
        kept = [v in self.fused for v in (*op.operands, *op.results)]
        again = self.read_before.get(id(op), ())
        return self.kinds[id(op)].number, op.name, *kept, *(v in again for v in op.operands)

    def work(self, op: Op, number: int, specs: Sequence[Spec]) -> Work:
        """The work of one run of an op on one device, without what it reads or writes inside a fusion."""
        key = number, *(spec.axes for spec in specs)
        if key not in self.works:
            self.works[key] = self.work_with(op, specs)
        return self.works[key]

    def work_with(self, op: Op, specs: Sequence[Spec]) -> Work:
        """The work of an op whose operands and results are sharded so."""
        values = (*op.operands, *op.results)
        arrays = [self.local(v, spec) for v, spec in zip(values, specs, strict=True)]
        n = len(op.operands)
        done = work(op.name, arrays[:n], arrays[n:], op.site[0].params)
        if op.name == "pallas_call":  # whose parameters are those of the whole grid
            axes = {axis for spec in specs for part in spec.axes for axis in part}
            done = dataclasses.replace(done, flops=done.flops / num_parts(axes, self.assignment.sizes))
        again = self.read_before.get(id(op), ())
        not_accessed = sum(
            math.prod(a.shape) * self.graph.itemsize(v)
            for k, (v, a) in enumerate(zip(values, arrays, strict=True))
            if v in self.fused or (k < n and v in again)
        )
        return dataclasses.replace(done, read_bytes=max(0.0, done.num_bytes - not_accessed), written_bytes=0)

    def timed(self, op: Op, done: Work) -> OpRun:
        """The time of an op with given work in each run."""
        chip = self.on.chip
        is_fused = not done.num_bytes and op.name in FUSED  # its arithmetic alone
        fused_seconds = op.times * done.flops / chip.rates.vector_flops_per_second
        return OpRun(
            seconds=fused_seconds if is_fused else op.times * op_seconds(done, chip),
            limit="compute" if is_compute_bound(done, chip) else "memory",
            matmul_flops=op.times * done.flops if done.matmul_dtype is not None else 0.0,
        )

    def local(self, v: int, spec: Spec) -> jax.ShapeDtypeStruct:
        shape = local_shape(spec.axes, self.graph.shapes[v], self.assignment.sizes)
        return jax.ShapeDtypeStruct(shape, self.graph.dtypes[v])
