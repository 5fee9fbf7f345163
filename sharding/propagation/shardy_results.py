"""Reads Shardy's result from a module: the sharding of every mark, and the edges along which axes propagated.

The pass records at each op which axis propagated from which of the op's arrays to which others, and in which step.
All MLIR values of a loop's or branch's array share one sharding, that of its data-flow edge op: its *node*.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .. import compat
from ..spec import Axis
from .shardy_marks import mark_number

_AXIS = r'"(\w+)"(?::\((\d+)\)(\d+))?'
_EDGE = re.compile(rf"step-(\d+)|\{{{_AXIS} = (\w+)-(\d+) -> \[([^\]]*)\]")
_CALL = "sdy.named_computation"
_END = re.compile(r"(\w+)-(\d+)")


@dataclass(frozen=True, slots=True)
class PropagationEdge:
    """The propagation of an axis from one node to another."""

    step: int
    axis: str
    """The mesh axis, also for a sub-axis of it."""
    source: Any
    op: str


@dataclass(slots=True)
class PropagationRecord:
    """The recorded shardings and edges; nodes are MLIR values."""

    marks: dict[int, tuple[tuple[Axis, ...], ...]] = field(default_factory=dict)
    """Mark -> the axes of each dim."""
    nodes: dict[int, list[Any]] = field(default_factory=dict)
    """Mark -> its nodes."""
    arguments: list[Any] = field(default_factory=list)
    edges: dict[Any, list[PropagationEdge]] = field(default_factory=dict)
    """Node -> the edges into it, in order."""


def read(module: Any) -> PropagationRecord:
    """Reads the record from a module after propagation."""
    found = PropagationRecord()

    def visit(op: Any) -> Any:
        mark = mark_number(op.location) if op.name in ("sdy.sharding_constraint", "sdy.reshard") else None
        if mark is not None:
            found.marks[mark] = dims(str(op.attributes["sharding"]))
            found.nodes.setdefault(mark, []).append(op.results[0])
            carried = node(op.operands[0])
            if _is_edge(carried):  # the mark of a loop's array is outside
                found.nodes[mark].append(carried)
        if op.name == "func.func" and str(op.attributes["sym_name"]) == '"main"':
            found.arguments = arrays(op.regions[0].blocks[0])
        if "sdy.propagation_edges" in op.attributes:
            _record_edges(op, found)
        return compat.mlir_passes()[0].WalkResult.ADVANCE

    module.operation.walk(visit)
    for edges in found.edges.values():
        edges.sort(key=lambda edge: edge.step)
    return found


def arrays(block: Any) -> list[Any]:
    """The arguments of a program, without the tokens that order its effects."""
    return [x for x in block.arguments if "token" not in str(x.type)]


def _is_edge(value: Any) -> bool:
    return not _is_argument(value) and _owner(value).name == "sdy.data_flow_edge"


def dims(text: str) -> tuple[tuple[Axis, ...], ...]:
    """Parses the axes of each dim from a sharding as Shardy prints it."""
    body = text[text.index("[") : text.rindex("]") + 1]
    return tuple(
        tuple((m[1], int(m[2]), int(m[3])) if m[2] else m[1] for m in re.finditer(_AXIS, dim))
        for dim in re.findall(r"\{(.*?)\}", body)
    )


def _record_edges(op: Any, found: PropagationRecord) -> None:
    step = 0
    for m in _EDGE.finditer(str(op.attributes["sdy.propagation_edges"])):
        if m[1] is not None:
            step = int(m[1])
            continue
        source = _end(op, m[5], int(m[6]))
        for kind, at in _END.findall(m[7]):
            target = _end(op, kind, int(at))
            if source is not None and target is not None and source != target:
                found.edges.setdefault(target, []).append(PropagationEdge(step, m[2], source, op.name))


def _end(op: Any, kind: str, at: int) -> Any:
    """Returns the node of an op's operand or result; the operands of a data-flow edge are all its sources."""
    if kind == "result":
        return node(op.results[at])
    if op.name != "sdy.data_flow_edge":
        return node(op.operands[at])
    sources = list(_entering(op.operands[0]))
    return node(sources[at]) if at < len(sources) else None


def _entering(value: Any) -> Iterator[Any]:
    """Yields the sources of an array of a loop, branch or called computation, in Shardy's order."""
    if _is_argument(value):
        yield _owner(value).operands[value.arg_number]
        return
    op, at = _owner(value), value.result_number
    regions = list(op.regions)
    if op.name == "stablehlo.while" or not regions:
        yield op.operands[at]
    for region in regions[1:] if op.name == "stablehlo.while" else regions:
        yield _last(region).operands[at]


def node(value: Any) -> Any:
    """Returns the node with a value's sharding: of a loop's argument its result, of a call's array the one outside."""
    if _is_argument(value):
        op = _owner(value)
        return node(_edge_of(op.results[value.arg_number])) if op.name == "stablehlo.while" else value
    op = _owner(value)
    if op.name == "sdy.data_flow_edge":
        array = op.operands[0]
        if _owner(array).name == _CALL:
            outside = _owner(array).operands if _is_argument(array) else _last(_owner(array).regions[0]).operands
            return node(outside[array.arg_number if _is_argument(array) else array.result_number])
    return value


def _edge_of(result: Any) -> Any:
    """Returns the data-flow edge of a loop's result, or the result itself if it has none."""
    edges = [use.owner.operation for use in result.uses if use.owner.operation.name == "sdy.data_flow_edge"]
    return edges[0].results[0] if edges else result


def _is_argument(value: Any) -> bool:
    return hasattr(value, "arg_number")


def _owner(value: Any) -> Any:
    """Returns the op that produces a value, or whose body has it as an argument."""
    owner = value.owner
    return owner.owner.operation if _is_argument(value) else owner.operation


def _last(region: Any) -> Any:
    operations = region.blocks[0].operations
    return operations[len(operations) - 1]
