"""What XLA's partitioner gets wrong, and how such an op is to be split instead.

Split in some ways an op gives wrong numbers, an internal error or the end of the process, in plain `jax.jit` under the
same constraints (found by `tests/fuzz`, on JAX 0.10.2 and 0.12). Here each such op names the dims that have to be whole
while it runs; its operands are moved first and its result after it. Delete an entry when the oldest supported XLA
splits its op rightly: `tests/test_limits.py` has the programs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .spec import CLOSED, Axis, Spec, num_parts

Shape = tuple[int, ...]
Split = tuple[tuple[Axis, ...], ...]
"""Per dim of one array its axes."""
Whole = set[tuple[int, int]]
"""(array, dim) that has to be whole; operands come first, then results."""


@dataclass(frozen=True, slots=True)
class Use:
    """One equation, and how the arrays around it are split."""

    params: Mapping[str, Any]
    shapes: Sequence[Shape]
    splits: Sequence[Split]
    sizes: Mapping[str, int]
    is_manual: bool = False
    """Whether it is in the body of a `shard_map`, along whose axes there is nothing to split."""


def specs(
    name: str,
    params: Mapping[str, Any],
    shapes: Sequence[Shape],
    found: Sequence[Spec | None],
    sizes: Mapping[str, int],
    *,
    is_manual: bool = False,
) -> list[Spec | None]:
    """The specs under which XLA computes an op rightly: those `found` with some dims made whole.

    Args:
        name: the op's primitive.
        params: the equation's parameters.
        shapes: of its operands, then of its results.
        found: the completed specs in the same order; None where XLA is left to choose.
        sizes: of the mesh axes.
        is_manual: whether it is in the body of a `shard_map`.
    """
    limit = LIMITS.get(name)
    if limit is None:
        return list(found)
    splits = [((),) * len(shape) if s is None else s.axes for s, shape in zip(found, shapes, strict=True)]
    whole = limit(Use(params, shapes, splits, sizes, is_manual))
    return [_cleared(s, [d for t, d in whole if t == i], shapes[i]) for i, s in enumerate(found)]


def starts(name: str, shapes: Sequence[Shape], found: Sequence[Spec | None]) -> list[tuple[int, int]]:
    """(operand, greatest value) of every start index that has to be clamped by hand before a dynamic slice or update.

    Along a split dim XLA takes a start beyond the end for what it says: it updates nothing, or gives zeros.
    """
    if name not in STARTS:
        return []
    first = STARTS[name]
    whole, part = shapes[0], shapes[1] if first == 2 else shapes[-1]
    arrays = [s for s, shape in zip(found, shapes, strict=True) if s is not None and len(shape) == len(whole)]
    return [
        (first + d, n - m)
        for d, (n, m) in enumerate(zip(whole, part, strict=True))
        if n != m and any(s.dims[d].axes for s in arrays)
    ]


STARTS = {"dynamic_slice": 1, "dynamic_update_slice": 2}
"""Primitive -> its first start index among the operands."""


def _cleared(spec: Spec | None, dims: Sequence[int], shape: Shape) -> Spec | None:
    if not dims or not shape:
        return spec
    old = (CLOSED,) * len(shape) if spec is None else spec.dims
    new = tuple(CLOSED if d in dims else dim for d, dim in enumerate(old))
    return spec if spec is not None and not any(spec.dims[d].axes for d in dims) else Spec(dims=new)


def _strided_slice(use: Use) -> Whole:
    """A step of more than one: wrong numbers where a device's part has no element of the result."""
    steps = use.params["strides"] or ()
    return {(t, d) for d, step in enumerate(steps) if step > 1 for t in (0, 1)}


def _cutting_pad(use: Use) -> Whole:
    """Widths below 0 or between elements: wrong numbers, or a failed check that ends the process."""
    widths = enumerate(use.params["padding_config"])
    return {(t, d) for d, (low, high, inside) in widths if min(low, high) < 0 or inside for t in (0, 2)}


def _reduced(use: Use) -> Whole:
    """Reductions that no all-reduce of XLA:CPU can finish."""
    axes = use.params["axes"] if "axes" in use.params else use.params["dimensions"]
    return {(t, d) for t, shape in enumerate(use.shapes) if shape == use.shapes[0] for d in axes}


def _transformed(use: Use) -> Whole:
    """A split along transformed dims: XLA gathers all dims, XLA:CPU into a layout that it then can't transform."""
    ndim = len(use.shapes[0])
    return {(t, d) for t in (0, 1) for d in range(ndim - len(use.params["fft_lengths"]), ndim)}


def _convolution(use: Use) -> Whole:
    """Kernels and grouped features are whole; a spatial dim may be split beside batch and input features only."""
    numbers = use.params["dimension_numbers"]
    batch, feature, *space = numbers.lhs_spec
    out_feature, in_feature, *kernel = numbers.rhs_spec
    out_batch, out_channel, *out_space = numbers.out_spec
    whole = {(1, d) for d in kernel}
    if use.params["feature_group_count"] > 1 or use.params["batch_group_count"] > 1:
        whole |= {(0, feature), (1, in_feature), (1, out_feature), (2, out_channel)}
    if use.params["batch_group_count"] > 1:
        whole |= {(0, batch), (2, out_batch)}

    def split(t: int, d: int) -> tuple[Axis, ...]:
        return () if (t, d) in whole else use.splits[t][d]

    alike = split(0, batch) == split(2, out_batch) and split(0, feature) == split(1, in_feature)
    free = not split(1, out_feature) and not split(2, out_channel)
    for d, o, between in zip(space, out_space, use.params["lhs_dilation"], strict=True):
        if not (alike and free and between == 1 and split(0, d) == split(2, o)):
            whole |= {(0, d), (2, o)}
    return whole


def _overlapping(use: Use) -> Whole:
    """The gradient of pooling by windows that overlap or leave gaps: wrong numbers along their dims."""
    geometry = zip(use.params["window_dimensions"], use.params["window_strides"], use.params["padding"], strict=True)
    sliding = [d for d, (window, step, pad) in enumerate(geometry) if window != step or tuple(pad) != (0, 0)]
    return {(t, d) for t in range(3) for d in sliding}


def _windows(use: Use) -> Whole:
    """The tangent of pooling: a failed check that ends the process."""
    return {(t, d) for t in range(3) for d, window in enumerate(use.params["window_dimensions"]) if window != 1}


def _contraction(use: Use) -> Whole:
    """A sum over an axis that at once comes to split the result, which is split otherwise too: wrong numbers.

    The dims of the result that such axes split are whole at first. A plain reduce-scatter, where nothing else moves,
    is right.
    """
    (left, right), (batch, _) = use.params["dimension_numbers"]
    summed = {a for t, dims in enumerate((left, right)) for d in dims for a in use.splits[t][d]}
    into = {(2, d) for d, axes in enumerate(use.splits[2]) if not summed.isdisjoint(axes)}
    natural = [use.splits[0][d] for d in batch]
    for t, dims in enumerate(((*left, *batch), (*right, *use.params["dimension_numbers"][1][1]))):
        natural += [axes for d, axes in enumerate(use.splits[t]) if d not in dims]
    moved = [d for d, axes in enumerate(use.splits[2]) if axes != natural[d]]
    plain = all(len(use.splits[2][d]) == 1 or summed.issuperset(use.splits[2][d]) for d in moved)
    return set() if len(moved) < 2 and plain else into


def _scattered(use: Use) -> Whole:
    """Updates in parts of unequal length: what fills the last part is scattered too."""
    updates, window = use.shapes[2], use.params["dimension_numbers"].update_window_dims
    found: Whole = set()
    for i, d in enumerate(d for d in range(len(updates)) if d not in window):
        for t, dim in ((1, i), (2, d)):
            if use.shapes[t][dim] % num_parts(use.splits[t][dim], use.sizes):
                found |= {(1, i), (2, d)}
    return found


def _looked_up(use: Use) -> Whole:
    """Rows of a table that is split by rows, at places split by another axis, in a `shard_map`: a failed check.

    On JAX 0.12; outside of one it is right.
    """
    numbers = use.params["dimension_numbers"]
    if not (use.is_manual and any(use.splits[0][d] for d in numbers.start_index_map)):
        return set()
    places = {(1, d) for d in range(len(use.shapes[1]) - 1)}
    return places | {(2, d) for d in range(len(use.shapes[2])) if d not in numbers.offset_dims}


LIMITS: dict[str, Callable[[Use], Whole]] = {
    "conv_general_dilated": _convolution,
    "dot_general": _contraction,
    "fft": _transformed,
    "gather": _looked_up,
    "pad": _cutting_pad,
    "reduce": _reduced,
    "reduce_xor": _reduced,
    **dict.fromkeys(("scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul", "scatter-sub"), _scattered),
    "select_and_gather_add": _windows,
    "select_and_scatter_add": _overlapping,
    "slice": _strided_slice,
}
"""Primitive -> the dims that have to be whole."""

NAMES = LIMITS.keys() | STARTS.keys()

READ = frozenset({"gather"})
"""Primitives whose operand has to be split already as the result takes it over; cutting the result ends in an error."""

LAID_OUT = frozenset({"fft"})
"""Primitives that XLA:CPU runs in one layout alone: beside collectives it may choose another and ends in an error."""
