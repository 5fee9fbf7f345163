"""From a completed program to its ledger: what each op's decision makes the devices send.

A value that is moved to one spec for several uses is moved once. What nothing depends on is not run. What a loop
takes in from outside and never changes is moved once, before the loop.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from .. import compat, limits
from ..cost import SUMS, Kind
from ..decision import Decision, Decisions
from ..graph import Graph, Op, Scope, line
from ..halo import halos, of_rotation, rotation, rotation_back
from ..propagation import Assignment
from ..reshard import Step, chain, local_bytes
from ..spec import Axis, Spec, axis_name, divisible, num_parts
from .advice import Advice
from .ledger import Collective, Ledger
from .scatter import scattered

MANUAL: Mapping[str, Kind] = {
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "all_to_all": "all-to-all",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "ppermute": "collective-permute",
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "reduce_scatter": "reduce-scatter",
}
"""The primitives by which a `shard_map` communicates."""


def communication(assignment: Assignment, *, name: str = "") -> Ledger:
    """Every collective that a completed program runs; of ops without a rule what XLA does is not known."""
    walk = Walk(assignment)
    found = [transfer.collective for _, transfers in walk.ops() for transfer in transfers]
    return Ledger((*found, *walk.own()), name=name)


@dataclass(frozen=True, slots=True)
class Transfer:
    """A collective in its place: what it takes from and what waits for it."""

    collective: Collective
    value: int
    """The value that is moved or summed up."""
    is_before: bool
    """Whether the op waits for it, rather than it for the op."""


class Walk:
    """One pass over the ops of a program that are run, each with its collectives in their order."""

    def __init__(self, assignment: Assignment):
        self.graph, self.specs, self.sizes = assignment.graph, assignment.specs, assignment.sizes
        self.decisions, self.advice = Decisions(assignment), Advice(assignment)
        self.times = _times(self.graph)
        self.entered = _entered(self.graph)
        self.branches = _branches(self.graph.scope)
        self.moved: set[tuple] = set()
        self.scattered = scattered(self.graph, self.specs, self.sizes)
        turned = [op for op in self.graph.ops if not self.graph.diverges(op)]
        self.turns = {op.results[0]: turn for op in turned if (turn := _turn(op, self.graph)) is not None}
        makers = self.graph.makers
        self.turning = {v for result in self.turns for op in of_rotation(makers[result], makers) for v in op.results}

    def ops(self) -> Iterator[tuple[Op, tuple[Transfer, ...]]]:
        """(op, its collectives) in program order."""
        live = _live(self.graph)
        for op in self.graph.ops:
            if not live.isdisjoint(op.results):
                yield op, tuple(self.transfers(op))

    def own(self) -> Iterator[Collective]:
        """What `shard_map`s over the whole mesh say themselves."""
        if self.graph.scope is not None:
            yield from self.bodies(self.graph.scope)

    def transfers(self, op: Op) -> Iterator[Transfer]:
        if op.rule is None:
            return
        if op.name == "edge":
            yield from self.edge(op)
        elif op.name in MANUAL:
            yield from (Transfer(c, op.results[0], False) for c in self.manual(op))
        elif op.results[0] in self.turning:
            return
        elif op.results[0] in self.turns:
            yield from (Transfer(c, op.operands[0], True) for c in self.turned(op))
        else:
            yield from self.op(op)

    def edge(self, op: Op) -> Iterator[Transfer]:
        """A value that enters or leaves a loop, a branch or the program lies there as was decided."""
        (target,) = op.results
        for v in op.operands:
            want = self.specs[target] if op.site else self.leaves(target)
            if v in self.times and self.specs[v].axes != want.axes:
                steps = self.chain(op, v, self.specs[v], want)
                what = f"{self.graph.label(target)}, {'where a loop has it' if op.site else 'a result'}"
                advise = partial(self.advice.edge, v, target)
                for c in self.moves(op, v, self.specs[v], steps, self.times[v], what, advise):
                    yield Transfer(c, v, True)

    def leaves(self, target: int) -> Spec:
        """How a result leaves the program: only what divides evenly can."""
        return divisible(self.specs[target], self.graph.shapes[target], self.sizes)

    def held(self, v: int) -> int:
        """Bytes of a value that one device has."""
        return local_bytes(self.specs[v].axes, self.graph.shapes[v], self.graph.itemsize(v), self.sizes)

    def chain(self, op: Op, v: int, have: Spec, want: Spec) -> tuple[Step, ...]:
        shape, itemsize = self.graph.shapes[v], self.graph.itemsize(v)
        return chain(have, want, shape, itemsize, self.sizes, permutes=not self.graph.diverges(op))

    def op(self, op: Op) -> Iterator[Transfer]:
        decision = self.decisions.of(op)
        needs, runs_as = self.limited(op, decision)
        for k, (v, steps) in enumerate(zip(op.operands, decision.operands, strict=True)):
            times, what = self.entered.get(v, op.times), f"operand {k} of {op.name}, {self.graph.label(v)}"
            advise = partial(self.advice.operand, op, v, needs[k])
            if v in self.times and needs[k].axes != decision.needs[k].axes:
                steps = (*steps, *self.chain(op, v, decision.needs[k], needs[k]))
            for c in self.moves(op, v, self.specs[v], steps, times, what, advise):
                yield Transfer(c, v, True)
        yield from self.exchanged(op, (*needs, *runs_as))
        for v, made, spec, steps in zip(op.results, decision.runs_as, runs_as, decision.results, strict=True):
            sums = [step for step in steps if step.kind in SUMS]
            rest = steps[len(sums) :]
            if spec.axes != made.axes:
                sums, rest = self.of_limited(v, sums, needs, spec), self.chain(op, v, spec, self.specs[v])
            for c in self.sums(op, v, sums, decision):
                yield Transfer(c, v, False)
            what, advise = f"result of {op.name}, {self.graph.label(v)}", partial(self.advice.result, v, spec)
            for c in self.moves(op, v, spec, rest, op.times, what, advise):
                yield Transfer(c, v, False)

    def limited(self, op: Op, decision: Decision) -> tuple[Sequence[Spec], Sequence[Spec]]:
        """How operands and results lie where XLA would compute an op wrongly as it was decided."""
        found = (*decision.needs, *decision.runs_as)
        if op.name in limits.LIMITS:
            shapes = [self.graph.shapes[v] for v in (*op.operands, *op.results)]
            is_manual = bool(self.graph.manual.get(op.results[0]))
            lying = limits.specs(op.name, op.site[0].params, shapes, found, self.sizes, is_manual=is_manual)
            found = tuple(b or a for a, b in zip(found, lying, strict=True))
        return found[: len(op.operands)], found[len(op.operands) :]

    def of_limited(self, v: int, sums: Sequence[Step], needs: Sequence[Spec], spec: Spec) -> list[Step]:
        """The sums of a result that lies otherwise than decided, over axes that still split an operand."""
        held = local_bytes(spec.axes, self.graph.shapes[v], self.graph.itemsize(v), self.sizes)
        split = {a for need in needs for axes in need.axes for a in axes}
        kept = [step for step in sums if not split.isdisjoint(step.axes)]
        return [dataclasses.replace(step, kind="all-reduce", spec=spec, num_bytes=held) for step in kept]

    def exchanged(self, op: Op, splits: Sequence[Spec]) -> Iterator[Transfer]:
        """What neighbours pass on along dims that an op slides over."""
        shapes = [self.graph.shapes[v] for v in (*op.operands, *op.results)]
        v = op.operands[0]
        held = local_bytes(splits[0].axes, shapes[0], self.graph.itemsize(v), self.sizes)
        for halo in halos(op, shapes, splits, self.sizes):
            cause = f"{op.name} reaches over the parts of dim {halo.dim}, which {_names(halo.axes)} splits"
            for share in halo.shares:
                size = int(held * share)
                yield Transfer(self.collective("collective-permute", halo.axes, size, op, v, op.times, cause), v, True)

    def turned(self, op: Op) -> Iterator[Collective]:
        """A rotation along a split dim: what each device passes on."""
        (v,) = op.results
        (dim, turn), spec = self.turns[v], self.specs[v]
        axes = spec.dims[dim].axes
        if not axes or not turn:
            return
        held, parts = self.held(v), num_parts(axes, self.sizes)
        rows = -(-self.graph.shapes[v][dim] // parts)
        far, rest = divmod(turn, rows)
        passed = [n for n, away in ((rows - rest, far), (rest, far + 1)) if n and away % parts]
        for part in passed:
            cause = f"turns dim {dim} by {turn}, which {_names(axes)} splits"
            yield self.collective("collective-permute", axes, held * part // rows, op, v, op.times, cause)

    def manual(self, op: Op) -> Iterator[Collective]:
        """What the body of a `shard_map` says itself."""
        eqn = op.site[0]
        for v in op.results:
            yield from self.said(eqn, self.held(v), str(self.graph.dtypes[v]), op.times, op.source)

    def bodies(self, scope: Scope, times: int = 1) -> Iterator[Collective]:
        """The `shard_map`s over the whole mesh, whose bodies are in no graph."""
        for i, eqn in enumerate(scope.jaxpr.eqns):
            if eqn.primitive.name == "shard_map" and (i, "jaxpr", 0) not in scope.children:
                yield from self.body(eqn.params["jaxpr"], times)
        for (i, _, _), child in scope.children.items():
            yield from self.bodies(child, times * _length(scope.jaxpr.eqns[i]))

    def body(self, jaxpr: Any, times: int) -> Iterator[Collective]:
        for eqn in compat.open_jaxpr(jaxpr).eqns:
            if eqn.primitive.name in MANUAL:
                for var in eqn.outvars:
                    size = math.prod(var.aval.shape) * var.aval.dtype.itemsize
                    yield from self.said(eqn, size, str(var.aval.dtype), times, line((eqn,)))
            for _, _, inner in compat.sub_jaxprs(eqn.params):
                yield from self.body(inner, times * _length(eqn))

    def said(self, eqn: Any, out: int, dtype: str, times: int, source: str) -> Iterator[Collective]:
        name = eqn.primitive.name
        asked = eqn.params.get("axes") or eqn.params.get("axis_name") or ()
        axes = tuple(a for a in (asked if isinstance(asked, tuple) else (asked,)) if self.sizes.get(a, 1) > 1)
        if axes:
            kind, n = MANUAL[name], num_parts(axes, self.sizes)
            yield Collective(
                kind=kind, axes=axes, num_devices=n, count=times, dtype=dtype, op=name, source=source, is_manual=True,
                result_bytes=out * n if kind == "reduce-scatter" else out, cause=f"the program's own {name}",
            )  # fmt: skip

    def sums(self, op: Op, v: int, steps: Sequence[Step], decision: Decision) -> Iterator[Collective]:
        """The sums with which a decision begins."""
        for step in steps:
            cause = f"{op.name} sums over a dim that {_names(step.axes)} splits"
            is_cut = step.kind == "all-reduce" and self.scattered.get(v) == frozenset(step.axes)
            kind = "reduce-scatter" if is_cut else step.kind
            found = self.collective(kind, step.axes, step.num_bytes, op, v, op.times, cause)
            yield dataclasses.replace(found, advise=partial(self.advice.sum, op, decision, step.axes))

    def moves(
        self, op: Op, v: int, have: Spec, steps: Sequence[Step], times: int, what: str, advise: Callable[[], str]
    ) -> Iterator[Collective]:
        """The collectives of a chain; what a branch, or all outside, takes to one spec twice is taken there once."""
        branch = self.branches.get(id(op.site[0])) if op.site else None
        for step in steps:
            key = (*self.untransposed(v, step.spec.axes), branch)
            if step.kind != "slice" and key not in self.moved:
                self.moved.add(key)
                cause = f"{what}, goes from {have} to {step.spec}"
                moved = self.collective(step.kind, step.axes, step.num_bytes, op, v, times, cause)
                yield dataclasses.replace(moved, advise=advise, is_move=True)
            have = step.spec

    def untransposed(self, v: int, axes: tuple[tuple[Axis, ...], ...]) -> tuple[int, tuple[tuple[Axis, ...], ...]]:
        """The value of which another is a transpose, and its split: XLA moves both as one."""
        op = self.graph.makers.get(v)
        while op is not None and op.name == "transpose":
            permutation = op.site[0].params["permutation"]
            axes = tuple(axes[permutation.index(d)] for d in range(len(axes)))
            (v,) = op.operands
            op = self.graph.makers.get(v)
        return v, axes

    def collective(
        self, kind: Kind | Literal["slice"], axes: tuple[Axis, ...], held: int, op: Op, v: int, times: int, cause: str
    ) -> Collective:
        assert kind != "slice"
        return Collective(
            kind=kind,
            axes=axes,
            num_devices=num_parts(axes, self.sizes),
            count=times,
            result_bytes=held,
            dtype=str(self.graph.dtypes[v]),
            op=op.name,
            source=op.source or self.graph.source(v),
            cause=cause,
        )


def _turn(op: Op, graph: Graph) -> tuple[int, int] | None:
    """(dim, places) by which an op turns an array, or None."""
    turn = rotation(op, graph.makers)
    return rotation_back(op, graph.makers) if turn is None else (op.site[0].params["dimension"], turn)


def _names(axes: Sequence[Axis]) -> str:
    return ", ".join(map(axis_name, axes))


def _length(eqn: Any) -> int:
    return eqn.params["length"] if eqn.primitive.name == "scan" else 1


def _times(graph: Graph) -> dict[int, int]:
    """Value -> how often it is made; constants, which are made where they are used, are not there."""
    return {**{v: op.times for v, op in graph.makers.items()}, **dict.fromkeys(graph.inputs, 1)}


def _entered(graph: Graph) -> dict[int, int]:
    """Value that a loop takes in from outside and never changes -> how often the loop runs."""
    return {op.results[0]: op.times for op in graph.ops if op.name == "edge" and op.site and len(op.operands) == 1}


def _branches(scope: Scope | None) -> dict[int, Scope]:
    """The id of an equation in a branch -> the innermost branch around it."""
    found: dict[int, Scope] = {}
    waiting: list[tuple[Scope, Scope | None]] = [(scope, None)] if scope is not None else []
    while waiting:
        one, branch = waiting.pop()
        if branch is not None:
            found.update((id(eqn), branch) for eqn in one.jaxpr.eqns)
        waiting += [(child, child if key == "branches" else branch) for (_, key, _), child in one.children.items()]
    return found


def _live(graph: Graph) -> set[int]:
    """The values that some result of the program depends on; the rest is never computed."""
    waiting = [*graph.outputs, *graph.spread]
    live = set(waiting)
    while waiting:
        op = graph.makers.get(waiting.pop())
        new = set(op.operands) - live if op is not None else set()
        live |= new
        waiting += new
    return live
