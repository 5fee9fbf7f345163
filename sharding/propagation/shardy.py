"""Propagation by Shardy, XLA's own pass, with the interface of `complete`: a graph in, an `Assignment` out.

The program is traced again with a mark on every value (`shardy_marks.py`) and lowered, and a copy of the module runs
through the propagating part of `sdy-propagation-pipeline`; nothing compiles and no device is needed. The marks give the
sharding of every value, the recorded edges (`shardy_results.py`) the source of each axis. Constant expressions, which
have no value in Shardy, are completed by the library's own engine.

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
from ..graph import Annotation, Graph, Op, value_annotations
from ..spec import Axis, Dim, MeshSizes, Spec, axis_size
from . import conflict_detection, shardy_results
from .assignment import Assignment, Reason
from .axis_atoms import AtomTable
from .fixed_point import Engine
from .interned_shardings import ValueSharding
from .propagate import specs_of
from .shardy_marks import Mark, MarkedProgram, mark_number
from .shardy_results import PropagationEdge, PropagationRecord

Axes = tuple[tuple[Axis, ...], ...]
"""The axes of each dim of one value."""

_PIPELINE = "builtin.module(sdy-propagation-pipeline)"
_LAST = "sdy-user-priority-propagate"
_PART_OF_AXIS = re.compile(r'"\w+":\(\d+\)\d+')
_RELEASES = "JAX 0.10.2 to 0.12.0"


def complete(graph: Graph, sizes: Mapping[str, int], *, program: Any, mesh: AbstractMesh, platform: str) -> Assignment:
    """Returns a spec for every value of `graph` as inferred by Shardy, with the reasons that it records.

    Args:
        graph: the annotated graph of the program.
        sizes: the mesh axis sizes.
        program: the closed jaxpr that the graph was built from.
        mesh: the mesh of the specs.
        platform: the platform to lower for.

    Raises:
        ShardingError: this JAX does not expose the pass to Python.
    """

    def with_annotations(annotations: Mapping[int, Annotation]) -> Assignment:
        return complete(graph.with_annotations(annotations), sizes, program=program, mesh=mesh, platform=platform)

    return _assignment(graph, sizes, _run_shardy(graph, program, mesh, platform), with_annotations)


def shardings(graph: Graph, program: Any, mesh: AbstractMesh, platform: str = "cpu") -> dict[int, Axes]:
    """Returns the sharding of every value that Shardy sees, including arguments and results of the program."""
    return _run_shardy(graph, program, mesh, platform).shardings


def _run_shardy(graph: Graph, program: Any, mesh: AbstractMesh, platform: str) -> _ShardyResult:
    passes, marks = _marked(graph, program, mesh, platform)
    module = passes.run(records=False)
    return _ShardyResult(graph, dict(mesh.shape), marks, shardy_results.read(module), module, passes)


def _assignment(
    graph: Graph,
    sizes: Mapping[str, int],
    found: _ShardyResult,
    with_annotations: Callable[[Mapping[int, Annotation]], Assignment],
) -> Assignment:
    engine = _engine_with(graph, sizes, found.shardings)
    specs = specs_of(engine)

    def origin(value: int, dim: int, atom: int) -> conflict_detection.ClaimOrigin:
        text = assignment.origin(value, dim, engine.table.positions[atom][0])
        return conflict_detection.ClaimOrigin(text, is_stored=False)

    assignment = Assignment(
        graph=graph,
        sizes=MeshSizes(sizes),
        specs=specs,
        with_annotations=with_annotations,
        find_reason=lambda v, d, axis: found.reason(specs, engine, v, d, axis),
        find_conflicts=lambda: conflict_detection.find(engine, specs, origin),
    )
    return assignment


def _engine_with(graph: Graph, sizes: Mapping[str, int], given: Mapping[int, Axes]) -> Engine:
    """Returns an engine with the given shardings, from which those of all other values are propagated."""
    engine = Engine(graph, AtomTable.of(sizes))
    engine.start()
    closed_dims = {v: engine.sharding(v).closed for v in given}
    for v, axes in given.items():
        atoms = tuple(map(engine.table.atoms_of, axes))
        engine.set(v, ValueSharding(axes=atoms, closed=(True,) * len(atoms)))
    engine.propagate()
    for v, closed in closed_dims.items():
        engine.set(v, engine.sharding(v)._replace(closed=closed))
    return engine


# Running the pass


def _marked(graph: Graph, program: Any, mesh: AbstractMesh, platform: str) -> tuple[_Passes, list[Mark]]:
    """Returns the pass over the marked program, and the program's marks."""
    marked = MarkedProgram(graph, program, mesh)
    jitted = jax.jit(marked.run, in_shardings=marked.in_shardings, keep_unused=True)  # arguments are found by place
    traced = jitted.trace(*marked.avals)
    lowered = traced.lower(lowering_platforms=(platform,))
    return _Passes.of(lowered, graph, marked.marks), marked.marks


@dataclass(frozen=True, kw_only=True)
class _Passes:
    """Shardy's propagation over a lowered program, with and without recording where each axis comes from."""

    ir: Any
    context: Any
    text: str
    """The module before propagation."""
    pipeline: str
    manager: Any
    graph: Graph
    marks: Sequence[Mark]

    @classmethod
    def of(cls, lowered: Any, graph: Graph, marks: Sequence[Mark]) -> _Passes:
        try:
            ir, passmanager = compat.mlir_passes()
            module = lowered.compiler_ir()
            with module.context as context:
                pipeline = _until_propagation(str(passmanager.PassManager.parse(_PIPELINE)))
                text = module.operation.get_asm(enable_debug_info=True)
        except (ImportError, AttributeError, ValueError) as error:
            raise _unsupported(error) from error
        manager = passmanager.PassManager
        return cls(ir=ir, context=context, text=text, pipeline=pipeline, manager=manager, graph=graph, marks=marks)

    def run(self, *, records: bool) -> Any:
        """Returns a module after propagation."""
        with self.context:
            passes = self.manager.parse(_recording(self.pipeline) if records else self.pipeline)
            passes.enable_verifier(False)  # recorded edges on a loop's edge op fail verification
            module = self.ir.Module.parse(self.text)
            _write_annotations(self.ir, module, self.graph, self.marks)
            passes.run(module.operation)
            return module


def _until_propagation(pipeline: str) -> str:
    """Returns the pipeline up to the propagation pass."""
    before, last, rest = pipeline.partition(_LAST)
    if not last:
        raise ValueError(f"the pipeline has no {_LAST}")
    text = before + last + rest[: rest.index("}") + 1]
    # The module-dumping pass is not registered.
    return text.replace("sdy-save-module,", "") + ")"


def _recording(pipeline: str) -> str:
    """Returns the pipeline with recording switched on."""
    # Not debug-sharding-origins, which is unused and crashes on a group in a loop.
    return re.sub(r"(debug-propagation[\w-]+)=false", r"\1=true", pipeline)


def _unsupported(error: Exception) -> ShardingError:
    return ShardingError(
        "engine='shardy'",
        found=[compat.versions(), str(error).splitlines()[0] if str(error) else type(error).__name__],
        required=f"a jaxlib that exposes XLA's propagation pass to Python, as in {_RELEASES}",
        fix=["engine='sharding', which implements the same rules", "engine='xla', which leaves propagation to XLA"],
    )


def _write_annotations(ir: Any, module: Any, graph: Graph, marks: Sequence[Mark]) -> None:
    """Adds to a module what JAX cannot express: priorities, open dims with axes, and sharding groups."""
    ends: dict[int, list[Any]] = {}
    taken = {-1}

    def visit(op: Any) -> Any:
        if op.name == "sdy.sharding_group":
            taken.add(ir.IntegerAttr(op.attributes["group_id"]).value)
        number = mark_number(op.location) if op.name == "sdy.sharding_constraint" else None
        if number is not None:
            mark = marks[number]
            if mark.spec is not None:
                before, after = str(op.attributes["sharding"]).split("[")[0], ", ".join(map(_dim_text, mark.spec.dims))
                op.attributes["sharding"] = ir.Attribute.parse(f"{before}[{after}]>")
            if mark.output:
                ends.setdefault(mark.value, []).append(op.results[0])
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    main = next(op for op in module.body.operations if op.operation.name == "func.func" and op.name.value == "main")
    block = main.regions[0].blocks[0]
    arguments = shardy_results.arrays(block)
    groups = [[x, *ends[v]] for v, x in zip(graph.inputs, arguments, strict=False) if v in ends]
    with ir.InsertionPoint(block.operations[len(block.operations) - 1]), ir.Location.unknown():
        for number, members in enumerate(groups, max(taken) + 1):
            group = {"group_id": ir.IntegerAttr.get(ir.IntegerType.get_signless(64), number)}
            for x in members:
                ir.Operation.create("sdy.sharding_group", operands=[x], attributes=group)


def _dim_text(dim: Dim) -> str:
    """Returns a dim in Shardy's syntax."""
    names = [f'"{a}"' if isinstance(a, str) else f'"{a[0]}":({a[1]}){a[2]}' for a in dim.axes]
    priority = f"p{dim.priority}" if dim.priority and dim.axes else ""
    return "{" + ", ".join([*names, *(["?"] if dim.open else [])]) + "}" + priority


# Reading the result


@dataclass(frozen=True)
class _ShardyResult:
    """The shardings that Shardy inferred, and the source of each axis as far as recorded."""

    graph: Graph
    sizes: Mapping[str, int]
    """Of the mesh axes."""
    marks: Sequence[Mark]
    silent: PropagationRecord
    """Without edges."""
    module: Any
    """Owns its MLIR values."""
    passes: _Passes

    @cached_property
    def recorded(self) -> tuple[PropagationRecord, Any]:
        """The record with the edges, and the module that owns its MLIR values.

        Only for a reason that someone asks for: as it records, Shardy may read past the end of a list of axes and
        end the process (`SourceShardingHandler` in `source_sharding.cc` of JAX 0.10.2 to 0.12): where parts of an axis
        shard an array, and where axes of a merged dim do not divide the dims that it is made of. No edges are recorded
        there.
        """
        if self.has_overflow or _PART_OF_AXIS.search(self.module.operation.get_asm(large_elements_limit=16)):
            return self.silent, self.module
        module = self.passes.run(records=True)
        return shardy_results.read(module), module

    @property
    def has_overflow(self) -> bool:
        """Whether an axis shards a dim of several factors, as of a reshape, without dividing the factor it falls on."""
        return any(
            len(factors) > 1 and not _is_divided([op.rule.sizes[f] for f in factors], axes, self.sizes)
            for op in self.graph.ops
            if op.rule is not None
            for v, dims in zip((*op.operands, *op.results), (*op.rule.operands, *op.rule.results), strict=True)
            if v in self.shardings
            for factors, axes in zip(dims, self.shardings[v], strict=True)
        )

    @property
    def record(self) -> PropagationRecord:
        return self.recorded[0]

    @cached_property
    def shardings(self) -> dict[int, Axes]:
        """Value -> its axes, for every value that Shardy sees."""
        annotations = value_annotations(self.graph)
        known = {v: annotations[v].spec.axes for v in self.graph.inputs if v in annotations}
        return known | {self.marks[number].value: dims for number, dims in self.silent.marks.items()}

    @cached_property
    def nodes(self) -> dict[int, list[Any]]:
        """Value -> its nodes."""
        nodes: dict[int, list[Any]] = {}
        for number, places in self.record.nodes.items():
            nodes.setdefault(self.marks[number].value, []).extend(places)
        for v, argument in zip(self.graph.inputs, self.record.arguments, strict=False):
            nodes.setdefault(v, []).append(argument)
        return nodes

    @cached_property
    def values(self) -> dict[Any, int]:
        """Node -> its value."""
        return {node: v for v, nodes in self.nodes.items() for node in nodes}

    @cached_property
    def ops_of(self) -> dict[int, set[int]]:
        """Value -> its producers and users."""
        ops_of: dict[int, set[int]] = {}
        for i, op in enumerate(self.graph.ops):
            for v in (*op.operands, *op.results):
                ops_of.setdefault(v, set()).add(i)
        return ops_of

    def reason(self, specs: Sequence[Spec], engine: Engine, v: int, d: int, axis: Axis) -> Reason:
        """Returns why a dim of a value is sharded over an axis."""
        annotation = self.graph.annotations.get(v)
        if annotation is not None and axis in annotation.spec.dims[d].axes:
            return Reason(word="annotated", origin=annotation.origin_of(d))
        step = None if v in self.shardings else engine.step(v, d, engine.table.atoms_of((axis,))[0])
        if step is not None:
            return Reason.of(engine.op_graph.ops[step.op], step.source, step.source_dim)
        name = axis if isinstance(axis, str) else axis[0]
        source, crossed = self.predecessor(v, name)
        if source is None:
            member = self.entry_member(v, d, axis)
            if member is not None:
                return Reason(word="same group", site=self.graph.group_site(v, member), value=member, dim=d)
            return Reason(word="Shardy", origin="Shardy (no origin recorded)")
        dim = next((k for k, dim in enumerate(specs[source].dims) if _has_axis(dim.axes, name)), None)
        op = self.op(v, source)
        if op is not None and dim is not None:
            return Reason.of(op, source, dim)
        word = op.name if op is not None else crossed
        return Reason(word=word, site=op.site if op is not None else self.graph.sites[v], value=source, dim=dim)

    def entry_member(self, value: int, dim: int, axis: Axis) -> int | None:
        """Returns the member of a value's group through which an axis entered the group."""
        name = axis if isinstance(axis, str) else axis[0]
        for member in self.graph.members(value)[1:]:
            annotation = self.graph.annotations.get(member)
            is_annotated = annotation is not None and axis in annotation.spec.dims[dim].axes
            if is_annotated or self.predecessor(member, name)[0] is not None:
                return member
        return None

    def predecessor(self, value: int, axis: str) -> tuple[int | None, str]:
        """Returns the value that an axis came from, and the first of Shardy's ops on its path."""
        at, seen, crossed = self.nodes.get(value, []), set(), ""
        while at:
            seen.update(at)
            edge = self.first_edge(at, axis, seen)
            if edge is None:
                break
            crossed = crossed or edge.op.removeprefix("stablehlo.")
            source = self.values.get(edge.source)
            if source is not None and source != value:
                return source, crossed
            at = [edge.source]
        return None, crossed

    def first_edge(self, nodes: Sequence[Any], axis: str, seen: set[Any]) -> PropagationEdge | None:
        """Returns the first recorded edge that brought an axis to any of the nodes from an unseen one."""
        edges = [e for x in nodes for e in self.record.edges.get(x, []) if e.axis == axis and e.source not in seen]
        return min(edges, key=lambda e: e.step, default=None)

    def op(self, value: int, source: int) -> Op | None:
        """Returns the op through which an axis came from `source` to `value`, possibly by way of a stacked array."""
        near, far = (self.ops_of.get(v, set()) for v in (value, source))
        for i in sorted(near & far) or sorted(near):
            op = self.graph.ops[i]
            between = [v for v in (*op.operands, *op.results) if v not in self.shardings]
            if i in far or any(far & self.ops_of[v] for v in between):
                return op
        return None


def _is_divided(factors: Sequence[int], axes: Sequence[Axis], sizes: Mapping[str, int]) -> bool:
    """Whether axes divide the factors of a dim, major ones first."""
    waiting = [*factors]
    for size in (axis_size(axis, sizes) for axis in axes):
        while len(waiting) > 1 and waiting[0] == 1:
            waiting.pop(0)
        if waiting[0] % size:
            return False
        waiting[0] //= size
    return True


def _has_axis(axes: Sequence[Axis], name: str) -> bool:
    return any(a == name or a[0] == name for a in axes)
