"""Workarounds for bugs of XLA's SPMD partitioner.

Under some shardings an op gives wrong numbers, an internal error or a crash, in plain `jax.jit` under the same
constraints (found by `tests/fuzz`, on JAX 0.10.2 and 0.12). Each such op lists the dims to replicate while it runs; its
operands are resharded before it and its results after it. Delete an entry once the oldest supported XLA partitions its
op correctly: `tests/rewrite/test_xla_workarounds.py` has the programs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.lax import GatherScatterMode

from .. import compat
from ..spec import CLOSED, Axis, Spec, num_parts
from .halo_exchange import is_gathered
from .local_convolution import is_depthwise, is_grouped, local_convolution
from .sliding_windows import WINDOWS

Shape = tuple[int, ...]
DimAxes = tuple[tuple[Axis, ...], ...]
"""The axes of each dim of one array."""
ReplicatedDims = set[tuple[int, int]]
"""(array, dim) to replicate; operands come first, then results."""


@dataclass(frozen=True, slots=True)
class ShardedOp:
    """One equation, and the shapes and shardings of its arrays."""

    name: str
    params: Mapping[str, Any]
    shapes: Sequence[Shape]
    axes: Sequence[DimAxes]
    sizes: Mapping[str, int]
    is_manual: bool = False
    """Whether it is in the body of a `shard_map`."""


def specs(
    name: str,
    params: Mapping[str, Any],
    shapes: Sequence[Shape],
    found: Sequence[Spec | None],
    sizes: Mapping[str, int],
    *,
    is_manual: bool = False,
) -> list[Spec | None]:
    """Returns the specs under which XLA partitions an op correctly: those `found` with some dims replicated.

    Args:
        name: the op's primitive.
        params: the equation's parameters.
        shapes: the shapes of its operands, then of its results.
        found: the inferred specs in the same order; None if left to XLA.
        sizes: the mesh axis sizes.
        is_manual: whether it is in the body of a `shard_map`.
    """
    workaround = WORKAROUNDS.get(name)
    if workaround is None:
        return list(found)
    axes = [((),) * len(shape) if s is None else s.axes for s, shape in zip(found, shapes, strict=True)]
    replicated = workaround(ShardedOp(name, params, shapes, axes, sizes, is_manual))
    if not replicated:
        return list(found)
    return [_replicate(s, [d for t, d in replicated if t == i], shapes[i]) for i, s in enumerate(found)]


def starts(
    name: str, params: Mapping[str, Any], shapes: Sequence[Shape], found: Sequence[Spec | None]
) -> list[tuple[int, Any]]:
    """Returns (operand, largest value) of every start index to clamp before a dynamic slice or update.

    Along a sharded dim XLA does not clamp a start index beyond the end: it updates nothing, or gives zeros. Before JAX
    0.12 it also takes the shards of a replicated slice from other rows, even through elementwise ops, and of a gather
    of one slice, which it runs as a dynamic slice.
    """
    if name == "gather" and not compat.CLAMPS_MERGED_SLICES:
        return _starts_of_one_slice(params, shapes)
    if name not in FIRST_START_INDEX:
        return []
    first = FIRST_START_INDEX[name]
    full, part = shapes[0], shapes[1] if first == 2 else shapes[-1]
    is_merged = name == "dynamic_slice" and not compat.CLAMPS_MERGED_SLICES
    arrays = [s for s, shape in zip(found, shapes, strict=True) if s is not None and len(shape) == len(full)]
    return [
        (first + d, n - m)
        for d, (n, m) in enumerate(zip(full, part, strict=True))
        if n != m and (is_merged or any(s.dims[d].axes for s in arrays))
    ]


def _starts_of_one_slice(params: Mapping[str, Any], shapes: Sequence[Shape]) -> list[tuple[int, Any]]:
    """The same for a gather, whose indices are one array, if it has one index."""
    if params["mode"] is not GatherScatterMode.CLIP or math.prod(shapes[1][:-1]) != 1:
        return []
    largest = [shapes[0][d] - params["slice_sizes"][d] for d in params["dimension_numbers"].start_index_map]
    return [(1, np.broadcast_to(np.asarray(largest, np.int64), shapes[1]))]


FIRST_START_INDEX = {"dynamic_slice": 1, "dynamic_update_slice": 2}
"""Primitive -> the operand that is its first start index."""


def _replicate(spec: Spec | None, dims: Sequence[int], shape: Shape) -> Spec | None:
    if not dims or not shape:
        return spec
    old = (CLOSED,) * len(shape) if spec is None else spec.dims
    new = tuple(CLOSED if d in dims else dim for d, dim in enumerate(old))
    return spec if spec is not None and not any(spec.dims[d].axes for d in dims) else Spec(dims=new)


def _strided_slice(op: ShardedOp) -> ReplicatedDims:
    """Strides above 1: wrong numbers if a shard has no element of the result."""
    steps = op.params["strides"] or ()
    return {(t, d) for d, step in enumerate(steps) if step > 1 for t in (0, 1)} | _window(op)


def _pad(op: ShardedOp) -> ReplicatedDims:
    """Negative or interior padding: wrong numbers, or a failed check that aborts the process."""
    widths = enumerate(op.params["padding_config"])
    return {(t, d) for d, (low, high, inside) in widths if min(low, high) < 0 or inside for t in (0, 2)} | _window(op)


def _window(op: ShardedOp) -> ReplicatedDims:
    """Halos that XLA does not exchange: it would gather all dims that windows slide over."""
    found: ReplicatedDims = set()
    result = len(op.shapes) - 1
    for one in WINDOWS[op.name](op.params, op.shapes):
        axes = op.axes[0][one.dim]
        if axes and axes == op.axes[result][one.result_dim]:
            if is_gathered(one, op.shapes[0][one.dim], num_parts(axes, op.sizes)):
                found |= {(0, one.dim), (result, one.result_dim)}
    return found


def _reduce(op: ShardedOp) -> ReplicatedDims:
    """Reductions that XLA:CPU has no all-reduce for."""
    axes = op.params["axes"] if "axes" in op.params else op.params["dimensions"]
    return {(t, d) for t, shape in enumerate(op.shapes) if shape == op.shapes[0] for d in axes}


def _fft(op: ShardedOp) -> ReplicatedDims:
    """Sharded transformed dims: XLA gathers all dims, XLA:CPU into a layout that its FFT does not support."""
    ndim = len(op.shapes[0])
    return {(t, d) for t in (0, 1) for d in range(ndim - len(op.params["fft_lengths"]), ndim)}


def _convolution(op: ShardedOp) -> ReplicatedDims:
    """Replicates kernels and grouped features; spatial dims stay sharded only beside batch and input features.

    A grouped convolution that each device can run on its shards keeps those, but no spatial dims.
    """
    numbers = op.params["dimension_numbers"]
    batch, feature, *space = numbers.lhs_spec
    out_feature, in_feature, *kernel = numbers.rhs_spec
    out_batch, out_channel, *out_space = numbers.out_spec
    replicated = {(1, d) for d in kernel}
    if is_grouped(op.params) and not op.is_manual:
        if not is_depthwise(op.params, op.shapes[1]):
            replicated |= {(0, d) for d in space} | {(2, d) for d in out_space}
        left = [[() if (t, d) in replicated else part for d, part in enumerate(dims)] for t, dims in enumerate(op.axes)]
        if local_convolution(op.params, op.shapes, left, op.sizes) is not None:
            return replicated
    if op.params["feature_group_count"] > 1 or op.params["batch_group_count"] > 1:
        replicated |= {(0, feature), (1, in_feature), (1, out_feature), (2, out_channel)}
    if op.params["batch_group_count"] > 1:
        replicated |= {(0, batch), (2, out_batch)}

    def axes(t: int, d: int) -> tuple[Axis, ...]:
        return () if (t, d) in replicated else op.axes[t][d]

    consistent = axes(0, batch) == axes(2, out_batch) and axes(0, feature) == axes(1, in_feature)
    unsharded_out = not axes(1, out_feature) and not axes(2, out_channel)
    for d, o, dilation in zip(space, out_space, op.params["lhs_dilation"], strict=True):
        if not (consistent and unsharded_out and dilation == 1 and axes(0, d) == axes(2, o)):
            replicated |= {(0, d), (2, o)}
    return replicated | _window(op)


def _pooling_gradient(op: ShardedOp) -> ReplicatedDims:
    """Gradient of pooling with overlapping or spaced windows: wrong numbers along their dims.

    Where windows cross the boundaries of shards, XLA exchanges more halos than it needs.
    """
    keys = ("window_dimensions", "window_strides", "padding")
    found: ReplicatedDims = set()
    for d, (window, step, pad) in enumerate(zip(*(op.params[key] for key in keys), strict=True)):
        parts = max(num_parts(axes[d], op.sizes) for axes in op.axes[:3])
        rows, windows = (-(-op.shapes[t][d] // parts) for t in (1, 0))
        if window != step or tuple(pad) != (0, 0) or (window > 1 and parts > 1 and windows * step != rows):
            found |= {(t, d) for t in range(3)}
    return found


def _pooling_tangent(op: ShardedOp) -> ReplicatedDims:
    """Tangent of pooling: a failed check that aborts the process."""
    return {(t, d) for t in range(3) for d, window in enumerate(op.params["window_dimensions"]) if window != 1}


def _dot(op: ShardedOp) -> ReplicatedDims:
    """A sum over an axis that also shards the result, where other axes of the result change too: wrong numbers.

    Replicates the result dims sharded over such axes at first. A plain reduce-scatter, without other changes, is
    correct.
    """
    (left, right), (batch, _) = op.params["dimension_numbers"]
    summed = {a for t, dims in enumerate((left, right)) for d in dims for a in op.axes[t][d]}
    scattered = {(2, d) for d, axes in enumerate(op.axes[2]) if not summed.isdisjoint(axes)}
    natural = [op.axes[0][d] for d in batch]
    for t, dims in enumerate(((*left, *batch), (*right, *op.params["dimension_numbers"][1][1]))):
        natural += [axes for d, axes in enumerate(op.axes[t]) if d not in dims]
    moved = [d for d, axes in enumerate(op.axes[2]) if axes != natural[d]]
    plain = all(len(op.axes[2][d]) == 1 or summed.issuperset(op.axes[2][d]) for d in moved)
    return set() if len(moved) < 2 and plain else scattered


def _scatter(op: ShardedOp) -> ReplicatedDims:
    """Unevenly sharded updates: the padding of the last shard is scattered too."""
    updates, window = op.shapes[2], op.params["dimension_numbers"].update_window_dims
    found: ReplicatedDims = set()
    for i, d in enumerate(d for d in range(len(updates)) if d not in window):
        for t, dim in ((1, i), (2, d)):
            if op.shapes[t][dim] % num_parts(op.axes[t][dim], op.sizes):
                found |= {(1, i), (2, d)}
    return found


def _gather(op: ShardedOp) -> ReplicatedDims:
    """Rows of a row-sharded table at indices sharded over another axis, in a `shard_map`: a failed check.

    On JAX 0.12; correct outside a `shard_map`.
    """
    numbers = op.params["dimension_numbers"]
    if not (op.is_manual and any(op.axes[0][d] for d in numbers.start_index_map)):
        return set()
    indices = {(1, d) for d in range(len(op.shapes[1]) - 1)}
    return indices | {(2, d) for d in range(len(op.shapes[2])) if d not in numbers.offset_dims}


SCATTERS = frozenset({"scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul", "scatter-sub"})


WORKAROUNDS: dict[str, Callable[[ShardedOp], ReplicatedDims]] = {
    "conv_general_dilated": _convolution,
    "dot_general": _dot,
    "fft": _fft,
    "gather": _gather,
    "pad": _pad,
    "reduce": _reduce,
    "reduce_xor": _reduce,
    **dict.fromkeys(SCATTERS, _scatter),
    "select_and_gather_add": _pooling_tangent,
    "select_and_scatter_add": _pooling_gradient,
    "slice": _strided_slice,
    **dict.fromkeys(("reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum"), _window),
}
"""Primitive -> the dims to replicate."""

AFFECTED = WORKAROUNDS.keys() | FIRST_START_INDEX.keys()
"""Primitives with a workaround."""

OPERAND_FIRST = SCATTERS | {"gather"}
"""Primitives whose operand must already be sharded as the result: slicing the result of a gather is an error, and XLA
gathers the updates of a scatter into a replicated operand."""

FIXED_LAYOUT = frozenset({"fft"})
"""Primitives that XLA:CPU runs in one layout only: near collectives it may choose another and fail."""
