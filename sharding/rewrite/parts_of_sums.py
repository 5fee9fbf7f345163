"""Sums of which each device keeps a slice, and an op then takes a part, such as the halves of a rotary embedding.

XLA:TPU takes the part of the whole sum, which it all-reduces then, or fails to compile. A barrier behind the slice
keeps the reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..graph import Op
from .op_strategy import OpStrategy

TAKES_PART = frozenset({"dynamic_slice", "slice", "split"})
"""Ops that take parts of an array."""


def is_scattered_then_sliced(strategy: OpStrategy, v: int | None, users: Mapping[int, Sequence[Op]]) -> bool:
    """Whether an op's only result is such a sum.

    Args:
        strategy: how the op runs.
        v: its result.
        users: value -> the ops that read it.
    """
    steps = strategy.result_steps[0]
    is_sum = bool(steps) and steps[0].is_sum and all(step.kind == "slice" or step.is_sum for step in steps)
    is_scattered = is_sum and any(step.kind in ("reduce-scatter", "slice") for step in steps)
    return is_scattered and v is not None and _is_sliced(v, users)


def _is_sliced(v: int, users: Mapping[int, Sequence[Op]]) -> bool:
    return any(
        use.name in TAKES_PART or (use.name == "annotate" and _is_sliced(use.results[0], users))
        for use in users.get(v, ())
    )
