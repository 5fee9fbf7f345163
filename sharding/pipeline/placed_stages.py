"""Stages' parameters in device order, marked as such: in model order they would give other numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from ..errors import ShardingError


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PlacedStages:
    """The stages' parameters, or their gradients, in the device order of a schedule; a pytree."""

    stages: Any
    """Leaves [devices x stages per device, ...]."""
    order: tuple[int, ...] = field(metadata={"static": True})
    """The stage of each row."""


def unplaced(asked: str, stages: Any, rows: Sequence[int], *, placed: bool) -> Any:
    """The leaves of stages whose rows are in the order that a step expects.

    Args:
        asked: the request, for errors.
        stages: a pytree in model order, or `PlacedStages`.
        rows: the stage of each row that the step expects.
        placed: whether the caller says that the stages are in device order.

    Raises:
        ShardingError: stages in another order.
    """
    if isinstance(stages, PlacedStages):
        if not placed:
            raise ShardingError(
                f"{asked}(placed=False)",
                found=f"stages that pipeline.place put in device order: {list(stages.order)}",
                required="stages in model order",
                fix="placed=True",
            )
        if stages.order != tuple(rows):
            raise ShardingError(
                f"{asked}(placed=True)",
                found=f"stages placed for another schedule: {list(stages.order)}",
                required=f"the device order of this schedule: {list(rows)}",
                fix="pipeline.place(stages, schedule) of the stages in model order",
            )
        return stages.stages
    if placed and list(rows) != list(range(len(rows))):
        raise ShardingError(
            f"{asked}(placed=True)",
            found="stages that do not come from pipeline.place",
            required=f"stages in device order: {list(rows)}",
            fix=["pipeline.place(stages, schedule)", "placed=False for stages in model order"],
        )
    return stages
