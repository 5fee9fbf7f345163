"""Predicts the collectives of a completed program from the strategy of each op.

A value that several uses need in one spec is resharded once, a loop invariant once before the loop. Dead code is out.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ..cost import Kind
from ..graph import CALLS, Op
from ..hardware import Platform
from ..propagation import Assignment
from ..rewrite import xla_workarounds
from ..rewrite.constraint_emitter import MOVES_SHARDS
from ..rewrite.executed_assignment import executed
from ..rewrite.invariant_reshards import enters_loop
from ..rewrite.moving_ops import moving_ops, operand_steps
from ..rewrite.op_strategy import OpStrategies, OpStrategy
from ..rewrite.reshard import Step, chain
from ..spec import Axis, Spec, local_bytes, num_parts
from ..xla.collective_lowering import is_gathered_by_all_reduce
from .callback_results import broadcast_results
from .collective_dtypes import CollectiveDtypes
from .collective_hints import Hints
from .collective_ledger import Collective, Ledger
from .cut_searches import cut_searches
from .host_copies import host_copies
from .reduce_scatter_creation import in_mesh_order, reduce_scattered, reduces_elementwise, stays_all_reduce
from .reshard_regions import ReshardRegions
from .runs_moved import loops_moved, read_by, times_moved
from .sending_ops import sending_ops
from .shard_exchanges import ShardExchanges, axis_names
from .shard_map_collectives import MANUAL, explicit, in_bodies
from .sum_reassociation import LOOKED_THROUGH, Reassociation, computation, reassociate, split_all_reduce, sums_and_rest
from .sums_behind_loops import Reduction
from .unknown_ops import unknown_ops

_SUMMING = {
    "conv_general_dilated": "conv_general_dilated contracts",
    "dot_general": "dot_general contracts",
    "edge": "a loop adds up partial sums over",
}
"""Primitive -> what it does along a dim, for causes."""


def communication(
    assignment: Assignment, *, name: str = "", known: ProgramCollectives | None = None, platform: Platform = "cpu"
) -> Ledger:
    """Every collective of a completed program, except of ops left to XLA, for a platform; those of one may be known."""

    @functools.cache
    def collectives(platform: Platform) -> tuple[Collective, ...]:
        program = known if known and known.platform == platform else ProgramCollectives(assignment, platform=platform)
        return (*(t.collective for _, transfers in program.ops for t in transfers), *program.in_shard_maps())

    find_cut = functools.cache(functools.partial(cut_searches, assignment))
    given = {"on_platform": collectives, "unknown": unknown_ops(assignment), "find_cut_searches": find_cut}
    given |= {"layers": assignment.graph.layers, "num_devices": math.prod(assignment.sizes.values())}
    return Ledger(collectives(platform), name=name, host_copies=host_copies(assignment.as_run), **given)


@dataclass(frozen=True, slots=True)
class Transfer:
    """A collective with its dependencies."""

    collective: Collective
    value: int
    """The value that is resharded or reduced."""
    is_before: bool
    """Whether the op depends on it, rather than it on the op."""


class ProgramCollectives:
    """One pass over the live ops of a program; yields each op's collectives in order.

    Args:
        assignment: a spec per value.
        platform: whose compiler may add partial sums before it reduces them.
    """

    def __init__(self, assignment: Assignment, *, platform: Platform = "cpu"):
        assignment = executed(assignment)
        self.platform: Platform = platform
        self.graph, self.specs, self.sizes = assignment.graph, assignment.specs, assignment.sizes
        self.boundary_spec = assignment.boundary_spec
        self.arriving = {v for v in self.graph.inputs if self.boundary_spec(v).axes != self.specs[v].axes}
        """Arguments that no op has read yet, which arrive with fewer axes than they are then sharded over."""
        self.strategies, self.hints = OpStrategies.shared(assignment), Hints(assignment)
        self.live, self.times = self.graph.live_values, self.graph.times
        self.regions = ReshardRegions(assignment, platform)
        self.operand_steps = functools.partial(operand_steps, assignment, self.strategies)
        self.resharded: set[tuple] = set()
        self.moving_ops = moving_ops(assignment)
        self.reduce_scattered = reduce_scattered(
            self.graph, self.specs, self.operand_steps, self.sizes, ops=self.moving_ops
        )
        self.reassociation = self.reassociated(platform)
        self.dtypes = CollectiveDtypes(assignment, platform)
        self.exchanges = ShardExchanges(self.graph, self.specs, self.sizes, self.collective)

    @functools.cached_property
    def ops(self) -> Sequence[tuple[Op, tuple[Transfer, ...]]]:
        """(op, its collectives) in program order; none for empty arrays, which XLA replaces by constants."""
        left, exchanges = self.reassociation.left, self.exchanges
        sending = sending_ops(self.graph, self.moving_ops, arriving=self.arriving, reduced=left, exchanges=exchanges)
        pairs = ((op, self.transfers(op) if id(op) in sending else ()) for op in self.graph.live_ops)
        return [(op, tuple([t for t in transfers if t.collective.result_bytes])) for op, transfers in pairs]

    def reassociated(self, platform: Platform) -> Reassociation:
        """The reductions that a platform's compiler leaves behind each op."""
        if platform not in LOOKED_THROUGH:
            return Reassociation()
        found = [
            (v, *self.sums_and_rest(v, steps))
            for op in self.moving_ops
            if op.name != "edge" and op.name not in MANUAL
            for v, steps in zip(op.results, self.strategies.of(op).result_steps, strict=True)
        ]
        makers, reductions = self.graph.makers, dict[int, list[Reduction]]()
        used = {(computation(makers.get(v)), frozenset(step.axes)) for v, sums, _ in found for step in sums}
        for v, sums, rest in found:
            if sums and not rest:
                is_whole = platform == "gpu" or reduces_elementwise(makers.get(v))
                reductions[v] = [(self.kind_of_sum(v, step, is_whole=is_whole), step.axes) for step in sums]
            elif split := split_all_reduce(makers.get(v), sums, rest, used, platform):
                reductions[v] = split

        def moves(op: Op) -> bool:
            return op.rule is None or not self.strategies.of(op).is_in_place

        def reads_in_place(op: Op) -> bool:
            strategy = None if op.rule is None else self.strategies.of(op)
            return (
                strategy is not None
                and not any(strategy.operand_steps)
                and all(v in reductions for v, steps in zip(op.results, strategy.result_steps, strict=True) if steps)
            )

        return reassociate(
            self.graph,
            platform,
            reductions,
            moves,
            reads_in_place,
            axes=lambda v: self.specs[v].axes,
            sizes=self.sizes,
            shard_bytes=self.shard_bytes,
        )

    def in_shard_maps(self) -> Iterator[Collective]:
        """The explicit collectives of `shard_map`s over all mesh axes."""
        if self.graph.scope is not None:
            yield from in_bodies(self.graph.scope, self.sizes, self.platform, self.graph.trips)

    def transfers(self, op: Op) -> Iterator[Transfer]:
        for v in self.arriving.intersection(op.operands):
            self.arriving.remove(v)
            have, what = self.boundary_spec(v), f"argument {self.graph.label(v)}"
            yield from (Transfer(c, v, True) for c in self.exchanges.realigned(op, v, have, self.specs[v], 1, what))
        if op.rule is None:
            return
        if op.name == "edge":
            yield from self.edge(op)
        elif op.name == "annotate":
            yield from self.annotation(op)
        elif op.name in MANUAL:
            for c in self.manual_collectives(op):
                yield Transfer(self.dtypes.of_value(c, op.results[0]), op.results[0], False)
        elif op.is_unknown or not op.results:
            yield from self.op(op) if op.operands else ()
            yield from (
                Transfer(c.in_loops(op.loops), v, False) for v, c in broadcast_results(op, self.graph, self.sizes)
            )
        elif op.results[0] in self.exchanges.rotation_parts:
            return
        elif op.results[0] in self.exchanges.rotations:
            yield from self.rotated(op)
        else:
            yield from self.op(op)

    def edge(self, op: Op) -> Iterator[Transfer]:
        """Reshards a value to its inferred spec where it enters or leaves a loop, a branch or the program."""
        (target,) = op.results
        for v in op.operands:
            want = self.specs[target] if op.site else self.boundary_spec(target)
            if v in self.times and self.specs[v].axes != want.axes:
                steps = self.chain(op, v, self.specs[v], want)
                reader, what = read_by(self.graph, op)
                advise = functools.partial(self.hints.edge, v, target)
                times = times_moved(self.graph, op, v, self.platform) if enters_loop(op) else self.times[v]
                for c in self.reshards(op, v, self.specs[v], steps, times, what, advise):
                    yield Transfer(dataclasses.replace(c, op=reader.name, source=reader.source or c.source), v, True)
        if (behind := self.reassociation.behind_loops.get(target)) is not None:
            steps = [self.reduction(target, kind, axes) for kind, axes in behind.reductions]
            for c in self.sums(op, target, steps, None):
                yield Transfer(c if c.dtype == behind.dtype else c.in_dtype(behind.dtype), target, False)

    def annotation(self, op: Op) -> Iterator[Transfer]:
        """Reshards an array to an annotation that its op's result does not have."""
        (v,), (target,) = op.operands, op.results
        have, want = self.specs[v], self.specs[target]
        if v in self.times and have.axes != want.axes:
            what = f"annotation of {self.graph.label(target)}"
            advise = functools.partial(self.hints.result, target, have)
            steps, times = self.chain(op, v, have, want), times_moved(self.graph, op, v, self.platform)
            yield from (Transfer(c, v, True) for c in self.reshards(op, v, have, steps, times, what, advise))

    def rotated(self, op: Op) -> Iterator[Transfer]:
        """Reshards an array to the spec of its rotation, then rotates it."""
        (result,) = op.results
        part = self.exchanges.rotations[result].cut
        v, want = part.operands[0], self.specs[result]
        if v in self.times:
            what, advise = f"rotation of {self.graph.label(v)}", functools.partial(self.hints.operand, part, v, want)
            steps = self.chain(op, v, self.specs[v], want)
            for c in self.reshards(op, v, self.specs[v], steps, op.times, what, advise):
                yield Transfer(c, v, True)
        for c in self.exchanges.rotated(op):
            yield Transfer(self.dtypes.of_value(c, result), v, True)

    def shard_bytes(self, v: int) -> int:
        """Bytes of a value on one device."""
        return local_bytes(self.specs[v].axes, self.graph.shapes[v], self.graph.itemsize(v), self.sizes)

    def chain(self, op: Op, v: int, have: Spec, want: Spec) -> tuple[Step, ...]:
        shape, itemsize = self.graph.shapes[v], self.graph.itemsize(v)
        return chain(have, want, shape, itemsize, self.sizes, permutes=not self.graph.diverges(op))

    def op(self, op: Op) -> Iterator[Transfer]:
        strategy = self.strategies.of(op)
        operand_specs, result_specs = self.with_workarounds(op, strategy)
        for k, (v, steps) in enumerate(zip(op.operands, strategy.operand_steps, strict=True)):
            if v in self.times and operand_specs[k].axes != strategy.operand_specs[k].axes:
                steps = self.chain(op, v, self.specs[v], operand_specs[k])
            if steps:
                times = times_moved(self.graph, op, v, self.platform)
                what = f"operand {k} of {op.name}, {self.graph.label(v)}"
                advise = functools.partial(self.hints.operand, op, v, operand_specs[k])
                for c in self.reshards(op, v, self.specs[v], steps, times, what, advise):
                    yield Transfer(c, v, True)
        for permute in self.exchanges.halos(op, (*operand_specs, *result_specs)):
            yield Transfer(self.dtypes.of_operand(permute, op), op.operands[0], True)
        results = zip(op.results, strategy.result_specs, result_specs, strategy.result_steps, strict=True)
        for v, planned, spec, steps in results:
            if v not in self.live:
                continue
            sums, rest = self.sums_and_rest(v, steps)
            if v in self.reassociation.left:
                sums, rest = [self.reduction(v, kind, axes) for kind, axes in self.reassociation.left[v]], ()
            if any(a.axes != b.axes for a, b in zip(operand_specs, strategy.operand_specs, strict=True)):
                present = {a for operand_spec in operand_specs for axes in operand_spec.axes for a in axes}
                sums = [step for step in sums if not present.isdisjoint(step.axes)]
            if spec.axes != planned.axes:
                sums = self.sums_with_workarounds(v, sums, spec)
                rest = self.chain(op, v, spec, self.specs[v])
            for c in self.sums(op, v, sums, strategy):
                yield Transfer(self.dtypes.of_value(c, v), v, False)
            if not rest:
                continue
            what, advise = f"result of {op.name}, {self.graph.label(v)}", functools.partial(self.hints.result, v, spec)
            for c in self.reshards(op, v, spec, rest, op.times, what, advise):
                yield Transfer(c, v, False)

    def sums_and_rest(self, v: int, steps: Sequence[Step]) -> tuple[list[Step], Sequence[Step]]:
        """The reductions of a result, and the steps that reshard it then."""
        is_scalar = self.shard_bytes(v) <= self.graph.itemsize(v)
        return sums_and_rest(self.graph.makers.get(v), steps, self.platform, self.sizes, is_scalar=is_scalar)

    def kind_of_sum(self, v: int, step: Step, *, is_whole: bool = True) -> Kind:
        """The kind of a reduction, which is a reduce-scatter if every use of its result is a slice.

        Args:
            v: the sum.
            step: its reduction.
            is_whole: whether a reduce-scatter may stay an all-reduce, which the compiler then slices.
        """
        assert step.kind != "slice"
        if step.kind == "all-reduce" and self.reduce_scattered.get(v) == frozenset(step.axes):
            return "reduce-scatter"
        stays = (
            is_whole
            and step.kind == "reduce-scatter"
            and stays_all_reduce(self.strategies, v, step, self.sizes, self.platform)
        )
        return "all-reduce" if stays else step.kind

    def reduction(self, v: int, kind: Kind, axes: tuple[Axis, ...]) -> Step:
        """A reduction of a value that is sharded as inferred."""
        sliced = tuple(axis for dim in self.specs[v].axes for axis in dim if axis in axes)
        size = self.shard_bytes(v) * num_parts(sliced, self.sizes)
        axes = in_mesh_order(axes, self.sizes)
        return Step(kind=kind, axes=axes, spec=self.specs[v], num_bytes=size, wire_bytes=0, is_sum=True)

    def with_workarounds(self, op: Op, strategy: OpStrategy) -> tuple[Sequence[Spec], Sequence[Spec]]:
        """The specs of operands and results, replaced where XLA would compute the op wrongly under the strategy's."""
        found = (*strategy.operand_specs, *strategy.result_specs)
        if op.name in xla_workarounds.WORKAROUNDS:
            shapes = [self.graph.shapes[v] for v in (*op.operands, *op.results)]
            is_manual = bool(self.graph.manual.get(op.results[0]))
            safe = xla_workarounds.specs(op.name, op.site[0].params, shapes, found, self.sizes, is_manual=is_manual)
            found = tuple(b or a for a, b in zip(found, safe, strict=True))
        return found[: len(op.operands)], found[len(op.operands) :]

    def sums_with_workarounds(self, v: int, sums: Sequence[Step], spec: Spec) -> list[Step]:
        """The sums of a result whose spec a workaround replaced."""
        shard_bytes = local_bytes(spec.axes, self.graph.shapes[v], self.graph.itemsize(v), self.sizes)
        return [dataclasses.replace(step, kind="all-reduce", spec=spec, num_bytes=shard_bytes) for step in sums]

    def manual_collectives(self, op: Op) -> Iterator[Collective]:
        """The explicit collectives in the body of a `shard_map`."""
        for v in op.results:
            dtype = self.graph.dtype_names[v]
            for c in explicit(op.site[0], self.shard_bytes(v), dtype, op.times, op.source, self.sizes):
                yield c.in_loops(op.loops)

    def sums(self, op: Op, v: int, steps: Sequence[Step], strategy: OpStrategy | None) -> Iterator[Collective]:
        """The reductions of an op's partial sums."""
        if op.name in ("argmax", "argmin"):
            yield from self.gathered_candidates(op, v, steps)
            return
        for step in steps:
            cause = f"{_SUMMING.get(op.name, f'{op.name} reduces')} a dim sharded over {axis_names(step.axes)}"
            kind = self.kind_of_sum(v, step)
            found = self.collective(kind, step.axes, step.num_bytes, op, v, op.times, cause)
            advise = str if strategy is None else functools.partial(self.hints.sum, op, strategy, step.axes)
            yield dataclasses.replace(found, advise=advise)

    def gathered_candidates(self, op: Op, v: int, steps: Sequence[Step]) -> Iterator[Collective]:
        """The gathers of each device's extreme value and of its index, among which every device then chooses."""
        for step in steps:
            cause = f"{op.name} along a dim sharded over {axis_names(step.axes)}"
            parts, (x,) = num_parts(step.axes, self.sizes), op.operands
            value_bytes = step.num_bytes * self.graph.itemsize(x) // self.graph.itemsize(v)
            for of, num_bytes in ((x, value_bytes), (v, step.num_bytes)):
                found = self.collective("all-gather", step.axes, parts * num_bytes, op, v, op.times, cause)
                yield dataclasses.replace(found, dtype=self.graph.dtype_names[of])

    def reshards(
        self, op: Op, v: int, have: Spec, steps: Sequence[Step], times: int, what: str, advise: Callable[[], str]
    ) -> Iterator[Collective]:
        """The collectives of a reshard; what a branch, a recomputation or the rest reshards twice moves once."""
        source, region = self.regions.of(op, v, have)
        body = ()
        if self.platform != "tpu":  # its compiler inlines calls first
            body = tuple(id(eqn) for eqn in op.site[1:] if eqn.primitive.name in CALLS)
        for i, step in enumerate(steps):
            own = body if i or step.kind in MOVES_SHARDS else None  # another body reshards a copy of its own
            key = (source, step.spec.axes, region, step.kind == "slice", own)
            if key not in self.resharded:
                self.resharded.add(key)
                if step.kind in ("all-gather", "all-reduce", "slice"):
                    yield from self.exchanges.realigned(op, v, have, step.spec, times, what)
                if step.kind == "slice":
                    have = step.spec
                    continue
                cause = f"{what}, resharded from {have} to {step.spec}"
                found = self.collective(step.kind, step.axes, step.num_bytes, op, v, times, cause)
                if step.kind == "all-gather" and self.is_gathered_by_all_reduce(v, have, step):
                    found = dataclasses.replace(found, kind="all-reduce")
                found = self.dtypes.of_reshard(found, v, step.spec)
                yield dataclasses.replace(found, advise=advise, is_move=True)
            have = step.spec

    def is_gathered_by_all_reduce(self, v: int, have: Spec, step: Step) -> bool:
        """Whether the compiler makes an all-reduce of padded shards of an all-gather."""
        parts = [[num_parts(axes, self.sizes) for axes in spec.axes] for spec in (have, step.spec)]
        shape = [-(-n // own) * (own // left) for n, own, left in zip(self.graph.shapes[v], *parts, strict=True)]
        return is_gathered_by_all_reduce(self.platform, shape, num_parts(step.axes, self.sizes))

    def collective(
        self,
        kind: Kind | Literal["slice"],
        axes: tuple[Axis, ...],
        result_bytes: int,
        op: Op,
        v: int,
        times: int,
        cause: str,
    ) -> Collective:
        assert kind != "slice"
        found = Collective(
            kind=kind,
            axes=axes,
            num_devices=num_parts(axes, self.sizes),
            count=times,
            result_bytes=result_bytes,
            dtype=self.graph.dtype_names[v],
            op=op.name,
            source=op.source or self.graph.source(v),
            cause=cause,
        )
        return found.in_loops(loops_moved(self.graph, op, v, self.platform))
