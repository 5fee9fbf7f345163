"""What Shardy writes into a module: the sharding of every mark, and the edges along which each axis came.

Its pass notes at each op which axis went from which of the op's arrays to which others, and in which step. An array of
a loop or a branch has one sharding with all that it stands for; its edge op holds it, so that is its *node*.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .. import compat
from ..spec import Axis
from .marked import place

_AXIS = r'"(\w+)"(?::\((\d+)\)(\d+))?'
_EDGE = re.compile(rf"step-(\d+)|\{{{_AXIS} = (\w+)-(\d+) -> \[([^\]]*)\]")
_CALL = "sdy.named_computation"
_END = re.compile(r"(\w+)-(\d+)")


@dataclass(frozen=True, slots=True)
class Flow:
    """An axis on its way from one node to another."""

    step: int
    axis: str
    """The mesh axis, whole or a part of it."""
    source: Any
    op: str


@dataclass(slots=True)
class Recorded:
    """Nodes are MLIR values."""

    marks: dict[int, tuple[tuple[Axis, ...], ...]] = field(default_factory=dict)
    """Mark -> per dim its axes."""
    nodes: dict[int, list[Any]] = field(default_factory=dict)
    """Mark -> where it is."""
    arguments: list[Any] = field(default_factory=list)
    flows: dict[Any, list[Flow]] = field(default_factory=dict)
    """Node -> what came to it, in order."""


def read(module: Any) -> Recorded:
    """All that is recorded in a module after Shardy's pass."""
    found = Recorded()

    def visit(op: Any) -> Any:
        mark = place(op.location) if op.name in ("sdy.sharding_constraint", "sdy.reshard") else None
        if mark is not None:
            found.marks[mark] = dims(str(op.attributes["sharding"]))
            found.nodes.setdefault(mark, []).append(op.results[0])
            carried = node(op.operands[0])
            if _is_edge(carried):  # a loop's array has its mark outside
                found.nodes[mark].append(carried)
        if op.name == "func.func" and str(op.attributes["sym_name"]) == '"main"':
            found.arguments = list(op.regions[0].blocks[0].arguments)
        if "sdy.propagation_edges" in op.attributes:
            _note(op, found)
        return compat.mlir_passes()[0].WalkResult.ADVANCE

    module.operation.walk(visit)
    for flows in found.flows.values():
        flows.sort(key=lambda flow: flow.step)
    return found


def _is_edge(value: Any) -> bool:
    return not _is_argument(value) and _owner(value).name == "sdy.data_flow_edge"


def dims(text: str) -> tuple[tuple[Axis, ...], ...]:
    """Per dim the axes of a sharding as Shardy prints it."""
    body = text[text.index("[") : text.rindex("]") + 1]
    return tuple(
        tuple((m[1], int(m[2]), int(m[3])) if m[2] else m[1] for m in re.finditer(_AXIS, dim))
        for dim in re.findall(r"\{(.*?)\}", body)
    )


def _note(op: Any, found: Recorded) -> None:
    step = 0
    for m in _EDGE.finditer(str(op.attributes["sdy.propagation_edges"])):
        if m[1] is not None:
            step = int(m[1])
            continue
        source = _end(op, m[5], int(m[6]))
        for kind, at in _END.findall(m[7]):
            target = _end(op, kind, int(at))
            if source is not None and target is not None and source != target:
                found.flows.setdefault(target, []).append(Flow(step, m[2], source, op.name))


def _end(op: Any, kind: str, at: int) -> Any:
    """The node of an op's operand or result; an edge op's operands are all that enters what it holds."""
    if kind == "result":
        return node(op.results[at])
    if op.name != "sdy.data_flow_edge":
        return node(op.operands[at])
    sources = list(_entering(op.operands[0]))
    return node(sources[at]) if at < len(sources) else None


def _entering(value: Any) -> Iterator[Any]:
    """What an array of a loop, branch or called computation is tied to, in Shardy's order."""
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
    """Where the sharding of a value is kept: a loop's argument is its result, a call's arrays are those around it."""
    if _is_argument(value):
        op = _owner(value)
        return node(_kept(op.results[value.arg_number])) if op.name == "stablehlo.while" else value
    op = _owner(value)
    if op.name == "sdy.data_flow_edge":
        held = op.operands[0]
        if _owner(held).name == _CALL:
            around = _owner(held).operands if _is_argument(held) else _last(_owner(held).regions[0]).operands
            return node(around[held.arg_number if _is_argument(held) else held.result_number])
    return value


def _kept(result: Any) -> Any:
    """The edge op's result that stands for the result of a loop."""
    edges = [use.owner.operation for use in result.uses if use.owner.operation.name == "sdy.data_flow_edge"]
    return edges[0].results[0] if edges else result


def _is_argument(value: Any) -> bool:
    return hasattr(value, "arg_number")


def _owner(value: Any) -> Any:
    """The op that makes a value, or in whose body it is an argument."""
    owner = value.owner
    return owner.owner.operation if _is_argument(value) else owner.operation


def _last(region: Any) -> Any:
    operations = region.blocks[0].operations
    return operations[len(operations) - 1]
