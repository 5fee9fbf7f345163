"""Factor rules of gather, scatter and dynamic slices."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .rule import Flow, Kind, Rule, RuleBuilder, Shape
from .shape import Params

AddFactor = Callable[..., None]
"""(operand dim, indices dim, slices dim, size, kind, blocked) -> None."""


def dynamic_slice(ins: Sequence[Shape], outs: Sequence[Shape], params: Params) -> Rule:
    """Full dims pass through; a sliced dim must be replicated."""
    del params
    rule = RuleBuilder(ins, outs)
    none = [None] * (len(ins) - 1)
    for d, (size, out_size) in enumerate(zip(ins[0], outs[0], strict=True)):
        is_sliced = size != out_size
        rule.factor([d, *none], [d], size, Kind.REPLICATE if is_sliced else Kind.PASS, blocked=is_sliced)
    return rule.build(Flow.SLICE)


def dynamic_update_slice(ins: Sequence[Shape], outs: Sequence[Shape], params: Params) -> Rule:
    """Full dims pass through; a partly updated dim stays sharded in the operand and is replicated in the update."""
    del params
    rule = RuleBuilder(ins, outs)
    none = [None] * (len(ins) - 2)
    for d, (size, update) in enumerate(zip(ins[0], ins[1], strict=True)):
        if size == update:
            rule.factor([d, d, *none], [d], size)
        else:
            rule.factor([d, None, *none], [d], size)
            rule.factor([None, d, *none], [None], update, Kind.REPLICATE)
    return rule.build(Flow.SLICE)


def gather(ins: Sequence[Shape], outs: Sequence[Shape], params: Params) -> Rule:
    """Batch dims and full slices pass through; an indexed dim is masked and reduced."""
    dnums = params["dimension_numbers"]
    rule = RuleBuilder(ins, outs)

    def add(operand: int | None, indices: int | None, slices: int | None, size: int, kind: Kind, blocked: bool) -> None:
        rule.factor([operand, indices, *[None] * (len(ins) - 2)], [slices], size, kind, blocked=blocked)

    _factors(
        add,
        operand=ins[0],
        indices=ins[1],
        slices=outs[0],
        offset_dims=dnums.offset_dims,
        collapsed=dnums.collapsed_slice_dims,
        operand_batch=dnums.operand_batching_dims,
        indices_batch=dnums.start_indices_batching_dims,
        batch_kind=Kind.PASS,
        scatter=False,
    )
    return rule.build()


def scatter(ins: Sequence[Shape], outs: Sequence[Shape], params: Params) -> Rule:
    """Overwriting scatter: updates must be replicated along their index dims."""
    return _scatter(ins, outs, params, Kind.REPLICATE)


def scatter_reduce(ins: Sequence[Shape], outs: Sequence[Shape], params: Params) -> Rule:
    """Scatter-add, -mul, -min or -max: sharded updates give partial results that are reduced."""
    return _scatter(ins, outs, params, Kind.REDUCE)


def _scatter(ins: Sequence[Shape], outs: Sequence[Shape], params: Params, batch_kind: Kind) -> Rule:
    dnums = params["dimension_numbers"]
    rule = RuleBuilder(ins, outs)

    def add(operand: int | None, indices: int | None, slices: int | None, size: int, kind: Kind, blocked: bool) -> None:
        rule.factor([operand, indices, slices], [operand], size, kind, blocked=blocked)

    _factors(
        add,
        operand=ins[0],
        indices=ins[1],
        slices=ins[2],
        offset_dims=dnums.update_window_dims,
        collapsed=dnums.inserted_window_dims,
        operand_batch=dnums.operand_batching_dims,
        indices_batch=dnums.scatter_indices_batching_dims,
        batch_kind=batch_kind,
        scatter=True,
    )
    return rule.build()


def _factors(
    add: AddFactor,
    *,
    operand: Shape,
    indices: Shape,
    slices: Shape,
    offset_dims: Sequence[int],
    collapsed: Sequence[int],
    operand_batch: Sequence[int],
    indices_batch: Sequence[int],
    batch_kind: Kind,
    scatter: bool,
) -> None:
    """Adds a factor per dim of the slices: window dims match operand dims, the others match dims of the indices."""
    windows = iter(d for d in range(len(operand)) if d not in collapsed and d not in operand_batch)
    batches = iter(range(len(indices) - 1))  # JAX keeps the index vector in the last dim
    for d, size in enumerate(slices):
        if d in offset_dims:
            _window(add, next(windows), d, operand, size, scatter)
            continue
        i = next(batches)
        paired = operand_batch[list(indices_batch).index(i)] if i in indices_batch else None
        add(paired, i, d, size, Kind.PASS if paired is not None else batch_kind, False)
    for d in collapsed:
        gathered = Kind.REDUCE if operand[d] > 1 else Kind.REPLICATE
        add(d, None, None, operand[d], Kind.PASS if scatter else gathered, False)
    add(None, len(indices) - 1, None, indices[-1], Kind.REPLICATE, False)


def _window(add: AddFactor, operand_dim: int, slices_dim: int, operand: Shape, size: int, scatter: bool) -> None:
    full = operand[operand_dim]
    if full == size:
        add(operand_dim, None, slices_dim, full, Kind.PASS, False)
    elif scatter or size == 1:
        add(operand_dim, None, None, full, Kind.REPLICATE if scatter else Kind.REDUCE, False)
        add(None, None, slices_dim, size, Kind.REPLICATE, False)
    else:
        add(operand_dim, None, slices_dim, full, Kind.REPLICATE, True)
