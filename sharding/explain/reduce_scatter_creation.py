"""All-reduces whose result is only sliced: compilers turn them into reduce-scatters (`ReduceScatterCreator`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from ..graph import Graph, Op
from ..hardware import Platform
from ..memory.primitive_traits import masks_rows
from ..rewrite.op_strategy import OperandSteps, OpStrategies
from ..rewrite.reshard import Step
from ..rules import Kind, Rule
from ..spec import Axis, Spec, local_shape, num_parts
from ..xla.collective_lowering import is_scattered_by_all_reduce

COMMUTES_WITH_SLICE = frozenset("add annotate barrier convert_element_type name".split())
"""Ops between a sum and its slice, such as a bias add, that may as well run after the slice."""


def in_mesh_order(axes: Iterable[Axis], sizes: Mapping[str, int]) -> tuple[Axis, ...]:
    """Some axes, as the devices along them are numbered."""
    names = list(sizes)
    return tuple(sorted(axes, key=lambda axis: names.index(axis if isinstance(axis, str) else axis[0])))


def is_part_of_each(spec: Spec, axes: tuple[Axis, ...]) -> bool:
    """Whether each device along some axes keeps the part of one dim that its number among them has."""
    return any(tuple(axis for axis in dim if axis in axes) == axes for dim in spec.axes)


def reduce_scattered(
    graph: Graph,
    specs: Sequence[Spec],
    operand_steps: OperandSteps,
    sizes: Mapping[str, int],
    *,
    ops: Iterable[Op] | None = None,
) -> dict[int, frozenset[Axis]]:
    """Value -> the axes over which it is sliced, if that is all that it is used for.

    A sum over these axes that ends in such a value is a reduce-scatter.

    Args:
        graph: the program.
        specs: of its values.
        operand_steps: op -> each operand, and the steps that reshard it for the op.
        sizes: the mesh axis sizes.
        ops: that may reshard. Default: all.
    """
    seen: dict[int, list[tuple[Spec, frozenset[Axis]]]] = {}
    for op in graph.ops if ops is None else ops:
        for v, steps in operand_steps(op):
            if steps and all(step.kind == "slice" for step in steps):
                axes = frozenset(axis for step in steps for axis in step.axes)
                seen.setdefault(v, []).append((steps[-1].spec, axes))
    found: dict[int, frozenset[Axis]] = {}
    waiting = [
        (v, slices[0][1])
        for v, slices in seen.items()
        if len(slices) == graph.num_uses[v]
        and all(spec.axes == slices[0][0].axes for spec, _ in slices)
        and (len(slices[0][1]) == 1 or is_part_of_each(slices[0][0], in_mesh_order(slices[0][1], sizes)))
    ]
    while waiting:
        v, axes = waiting.pop()
        if v in found:
            continue
        found[v] = axes
        op = graph.makers.get(v)
        if op is not None and op.name in COMMUTES_WITH_SLICE:
            waiting += [(o, axes) for o in op.operands if specs[o].axes == specs[v].axes and graph.num_uses[o] == 1]
    return found


def summed_axes(rule: Rule, specs: Sequence[Spec]) -> tuple[Axis, ...]:
    """The axes of the dim that an op sums over, in their order; none if there are several such dims.

    Args:
        rule: of the op.
        specs: of its operands.
    """
    found = {
        axes
        for dims, spec in zip(rule.operands, specs, strict=True)
        for factors, axes in zip(dims, spec.axes, strict=True)
        if axes and any(rule.kinds[f] is Kind.REDUCE for f in factors)
    }
    return found.pop() if len(found) == 1 else ()


def stays_all_reduce(
    strategies: OpStrategies, v: int, step: Step, sizes: Mapping[str, int], platform: Platform
) -> bool:
    """Whether a platform's compiler all-reduces a sum of which each device keeps a slice, and slices it then.

    The slices are along one dim, and in the order of the devices in their groups: for a sum over all axes of a dim that
    of the dim, else that of the result.

    Args:
        strategies: of the program's ops.
        v: the sum.
        step: its reduce-scatter.
        sizes: the mesh axis sizes.
        platform: whose compiler it is.
    """
    graph = strategies.graph
    op = graph.makers.get(v)
    order = () if op is None or op.rule is None else summed_axes(op.rule, strategies.of(op).operand_specs)
    is_in_order = {*order} != {*step.axes} or is_part_of_each(step.spec, order)
    if len(step.dims) > 1 or (step.dims and not is_in_order):
        return True
    if platform == "gpu":
        return op is not None and bool(op.site) and masks_rows(op.site[0])
    shard, parts = local_shape(step.spec.axes, graph.shapes[v], sizes), num_parts(step.axes, sizes)
    for d in step.dims:
        shape = [n * parts if k == d else n for k, n in enumerate(shard)]
        if is_scattered_by_all_reduce(platform, shape, d, parts, graph.itemsize(v), _tile_of_product(op)):
            return True
    return False


def reduces_elementwise(op: Op | None) -> bool:
    """Whether an op is a product of vectors, or of rows: compilers multiply elementwise, and reduce it as they do."""
    if op is None or op.rule is None or op.name != "dot_general":
        return False
    left, right = _factors_of_operands(op.rule)
    return all(op.rule.sizes[f] == 1 or f in left & right for factors in op.rule.results[0] for f in factors)


def _tile_of_product(op: Op | None) -> tuple[int, int] | None:
    """The dims of a product's result along lanes and rows: the last ones of its matrices; None for other ops."""
    if op is None or op.rule is None or op.name != "dot_general":
        return None
    left, right = _factors_of_operands(op.rule)
    free = [(d, set(factors)) for d, factors in enumerate(op.rule.results[0]) if factors]
    rows = [d for d, factors in free if factors <= left - right]
    columns = [d for d, factors in free if factors <= right - left]
    return (columns[-1], rows[-1]) if rows and columns else None


def _factors_of_operands(rule: Rule) -> Iterator[set[int]]:
    return ({f for factors in dims for f in factors} for dims in rule.operands)
