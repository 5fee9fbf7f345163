"""Shardy, XLA's own pass, behind the interface of ours: the same graph in, an `Assignment` of the same form out.

The program is traced once more with a mark on every value (`marked.py`), lowered, and a copy of the module goes through
the part of `sdy-propagation-pipeline` that propagates; nothing compiles and no device is needed. The marks say how
every value is split, the recorded edges (`recorded.py`) where each axis came from. A constant that each use makes anew
is no value to Shardy: ours completes those from what is around them.

References: openxla/shardy, `docs/propagation.md`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.sharding import AbstractMesh

from .. import compat
from ..errors import ShardingError
from ..graph import Graph, Op, Pin, all_pins
from ..spec import Axis, Dim, Spec
from . import conflicts, recorded
from .assignment import Assignment, Reason
from .atoms import AtomTable
from .complete import specs_of
from .engine import Engine
from .marked import Mark, Marked, place
from .recorded import Flow, Recorded
from .splits import Split

Axes = tuple[tuple[Axis, ...], ...]
"""Per dim of one value its axes."""

_PIPELINE = "builtin.module(sdy-propagation-pipeline)"
_LAST = "sdy-user-priority-propagate"
_RELEASES = "JAX 0.10.2 to 0.12.0"


def complete(graph: Graph, sizes: Mapping[str, int], *, program: Any, mesh: AbstractMesh, platform: str) -> Assignment:
    """A spec for every value of `graph` as Shardy finds it, with the reasons that it records.

    Args:
        graph: of the program, with its annotations.
        sizes: of the mesh's axes.
        program: the closed jaxpr that the graph was built from.
        mesh: what the specs' axes are axes of.
        platform: what to lower for.

    Raises:
        ShardingError: this JAX does not let Python run the pass.
    """

    def with_pins(pins: Mapping[int, Pin]) -> Assignment:
        return complete(graph.with_pins(pins), sizes, program=program, mesh=mesh, platform=platform)

    return _assignment(graph, sizes, _found(graph, program, mesh, platform), with_pins)


def splits(graph: Graph, program: Any, mesh: AbstractMesh, platform: str = "cpu") -> dict[int, Axes]:
    """The split of every value that Shardy sees, arguments and results of the program included."""
    return _found(graph, program, mesh, platform).splits


def _found(graph: Graph, program: Any, mesh: AbstractMesh, platform: str) -> _Found:
    module, marks = _propagated(graph, program, mesh, platform)
    return _Found(graph, marks, recorded.read(module), module)


def _assignment(
    graph: Graph, sizes: Mapping[str, int], found: _Found, with_pins: Callable[[Mapping[int, Pin]], Assignment]
) -> Assignment:
    engine = _adopted(graph, sizes, found.splits)
    specs = specs_of(engine)

    def origin(value: int, dim: int, atom: int) -> str:
        return assignment.origin(value, dim, engine.table.homes[atom][0])

    assignment = Assignment(
        graph=graph,
        sizes=dict(sizes),
        specs=specs,
        with_pins=with_pins,
        find_reason=lambda v, d, axis: found.reason(specs, engine, v, d, axis),
        find_conflicts=lambda: conflicts.find(engine, specs, origin),
    )
    return assignment


def _adopted(graph: Graph, sizes: Mapping[str, int], splits: Mapping[int, Axes]) -> Engine:
    """Our engine, in which the given splits hold and every other value follows from them."""
    engine = Engine(graph, AtomTable.of(sizes))
    engine.start()
    asked = {v: engine.split(v).closed for v in splits}
    for v, split in splits.items():
        atoms = tuple(map(engine.table.split, split))
        engine.set(v, Split(axes=atoms, closed=(True,) * len(atoms)))
    engine.settle()
    for v, closed in asked.items():
        engine.set(v, engine.split(v)._replace(closed=closed))
    return engine


# Running the pass


def _propagated(graph: Graph, program: Any, mesh: AbstractMesh, platform: str) -> tuple[Any, list[Mark]]:
    """The marked program's module after propagation, and what each mark stands for."""
    marked = Marked(graph, program, mesh)
    traced = jax.jit(marked.run, in_shardings=marked.in_shardings).trace(*marked.avals)
    lowered = traced.lower(lowering_platforms=(platform,))
    return run(lowered, graph, marked.marks), marked.marks


def run(lowered: Any, graph: Graph, marks: Sequence[Mark]) -> Any:
    """A copy of a lowered program's module after propagation; the original is what JAX caches."""
    try:
        ir, passmanager = compat.mlir_passes()
        module = lowered.compiler_ir()
        with module.context:
            passes = passmanager.PassManager.parse(_recording(str(passmanager.PassManager.parse(_PIPELINE))))
            passes.enable_verifier(False)  # an edge op of a loop that has recorded edges doesn't verify
    except (ImportError, AttributeError, ValueError) as error:
        raise _missing(error) from error
    with module.context:
        copy = ir.Module.parse(module.operation.get_asm(enable_debug_info=True))
        _write(ir, copy, graph, marks)
        passes.run(copy.operation)
    return copy


def _recording(pipeline: str) -> str:
    """The pipeline up to the pass that propagates, which is to record what it does."""
    before, last, rest = pipeline.partition(_LAST)
    if not last:
        raise ValueError(f"the pipeline has no {_LAST}")
    text = before + last + rest[: rest.index("}") + 1]
    # What only dumps modules is no registered pass.
    text = text.replace("sdy-save-module,", "")
    # Not its debug-sharding-origins, which nothing reads: it crashes on a group in a loop.
    return re.sub(r"(debug-propagation[\w-]+)=false", r"\1=true", text) + ")"


def _missing(error: Exception) -> ShardingError:
    return ShardingError(
        "engine='shardy'",
        there=[compat.versions(), str(error).splitlines()[0] if str(error) else type(error).__name__],
        must=f"jaxlib lets Python run XLA's propagation pass, as in {_RELEASES}",
        fix=["engine='sharding', our own pass by the same rules", "engine='xla', which leaves the pass to XLA"],
    )


def _write(ir: Any, module: Any, graph: Graph, marks: Sequence[Mark]) -> None:
    """Says in a module what JAX has no word for: priorities, axes that may get company, arrays always split alike."""
    ends: dict[int, list[Any]] = {}
    taken = {-1}

    def visit(op: Any) -> Any:
        if op.name == "sdy.sharding_group":
            taken.add(ir.IntegerAttr(op.attributes["group_id"]).value)
        number = place(op.location) if op.name == "sdy.sharding_constraint" else None
        if number is not None:
            mark = marks[number]
            if mark.spec is not None:
                before, after = str(op.attributes["sharding"]).split("[")[0], ", ".join(map(_written, mark.spec.dims))
                op.attributes["sharding"] = ir.Attribute.parse(f"{before}[{after}]>")
            if mark.output:
                ends.setdefault(mark.value, []).append(op.results[0])
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    main = next(op for op in module.body.operations if op.operation.name == "func.func" and op.name.value == "main")
    block = main.regions[0].blocks[0]
    groups = [[x, *ends[v]] for v, x in zip(graph.inputs, block.arguments, strict=False) if v in ends]
    with ir.InsertionPoint(block.operations[len(block.operations) - 1]), ir.Location.unknown():
        for number, members in enumerate(groups, max(taken) + 1):
            group = {"group_id": ir.IntegerAttr.get(ir.IntegerType.get_signless(64), number)}
            for x in members:
                ir.Operation.create("sdy.sharding_group", operands=[x], attributes=group)


def _written(dim: Dim) -> str:
    """A dim as Shardy writes it."""
    names = [f'"{a}"' if isinstance(a, str) else f'"{a[0]}":({a[1]}){a[2]}' for a in dim.axes]
    waits = f"p{dim.priority}" if dim.priority and dim.axes else ""
    return "{" + ", ".join([*names, *(["?"] if dim.open else [])]) + "}" + waits


# Reading it back


@dataclass(frozen=True)
class _Found:
    """The splits that were found, and the way of each axis as far as it is recorded."""

    graph: Graph
    marks: Sequence[Mark]
    recorded: Recorded
    module: Any
    """Owns what is recorded."""

    @cached_property
    def splits(self) -> dict[int, Axes]:
        """Value -> its split, of every value that Shardy sees."""
        pins = all_pins(self.graph)
        known = {v: pins[v].spec.axes for v in self.graph.inputs if v in pins}
        return known | {self.marks[number].value: dims for number, dims in self.recorded.marks.items()}

    @cached_property
    def nodes(self) -> dict[int, list[Any]]:
        """Value -> its nodes."""
        nodes: dict[int, list[Any]] = {}
        for number, places in self.recorded.nodes.items():
            nodes.setdefault(self.marks[number].value, []).extend(places)
        for v, argument in zip(self.graph.inputs, self.recorded.arguments, strict=False):
            nodes.setdefault(v, []).append(argument)
        return nodes

    @cached_property
    def values(self) -> dict[Any, int]:
        """Node -> the value it is of."""
        return {node: v for v, nodes in self.nodes.items() for node in nodes}

    @cached_property
    def touching(self) -> dict[int, set[int]]:
        """Value -> the ops that touch it."""
        touching: dict[int, set[int]] = {}
        for i, op in enumerate(self.graph.ops):
            for v in (*op.operands, *op.results):
                touching.setdefault(v, set()).add(i)
        return touching

    def reason(self, specs: Sequence[Spec], engine: Engine, v: int, d: int, axis: Axis) -> Reason:
        """Why a dim of a value is split by an axis."""
        pin = self.graph.pins.get(v)
        if pin is not None and axis in pin.spec.dims[d].axes:
            return Reason(word="annotated", origin=pin.said(d))
        step = None if v in self.splits else engine.step(v, d, engine.table.split((axis,))[0])
        if step is not None:
            return Reason.of(engine.network.ops[step.op], step.source, step.source_dim)
        name = axis if isinstance(axis, str) else axis[0]
        source, crossed = self.before(v, name)
        if source is None:
            first = self.brought(v, d, axis)
            if first is not None:
                return Reason(word="same group", site=self.graph.tied_at(v, first), value=first, dim=d)
            return Reason(word="Shardy", origin="Shardy, which records no origin here")
        dim = next((k for k, dim in enumerate(specs[source].dims) if _holds(dim.axes, name)), None)
        op = self.op(v, source)
        if op is not None and dim is not None:
            return Reason.of(op, source, dim)
        word = op.name if op is not None else crossed
        return Reason(word=word, site=op.site if op is not None else self.graph.sites[v], value=source, dim=dim)

    def brought(self, value: int, dim: int, axis: Axis) -> int | None:
        """The member of a value's group that an axis came to from outside the group."""
        name = axis if isinstance(axis, str) else axis[0]
        for member in self.graph.members(value)[1:]:
            pin = self.graph.pins.get(member)
            if (pin is not None and axis in pin.spec.dims[dim].axes) or self.before(member, name)[0] is not None:
                return member
        return None

    def before(self, value: int, axis: str) -> tuple[int | None, str]:
        """The value from which an axis came to another one, and the first of Shardy's ops on the way."""
        at, seen, crossed = self.nodes.get(value, []), set(), ""
        while at:
            seen.update(at)
            flow = self.first(at, axis, seen)
            if flow is None:
                break
            crossed = crossed or flow.op.removeprefix("stablehlo.")
            source = self.values.get(flow.source)
            if source is not None and source != value:
                return source, crossed
            at = [flow.source]
        return None, crossed

    def first(self, nodes: Sequence[Any], axis: str, seen: set[Any]) -> Flow | None:
        """The first arrival of an axis at any of the nodes from elsewhere."""
        flows = [f for x in nodes for f in self.recorded.flows.get(x, []) if f.axis == axis and f.source not in seen]
        return min(flows, key=lambda f: f.step, default=None)

    def op(self, value: int, source: int) -> Op | None:
        """The op by which an axis came to a value from another one; a loop's stack may be between them."""
        near, far = (self.touching.get(v, set()) for v in (value, source))
        for i in sorted(near & far) or sorted(near):
            op = self.graph.ops[i]
            between = [v for v in (*op.operands, *op.results) if v not in self.splits]
            if i in far or any(far & self.touching[v] for v in between):
                return op
        return None


def _holds(axes: Sequence[Axis], name: str) -> bool:
    return any(a == name or a[0] == name for a in axes)
