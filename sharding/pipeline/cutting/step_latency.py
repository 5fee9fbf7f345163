"""DAPPLE's latency estimate for a step with a flush, from its pivot stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from ...errors import ShardingError
from ..task_table import check_positive


class Phase(NamedTuple):
    """A stage, or the transfer between two stages: times per microbatch, and of the all-reduce per step."""

    forward: float
    backward: float
    all_reduce: float = 0.0
    """Of the stage's gradients over its devices, once at the end."""


@dataclass(frozen=True, kw_only=True)
class Latency:
    """The latency of a step in three phases around the pivot: the stage without bubbles in the steady phase."""

    pivot: int
    """Index into the phases."""
    warmup: float
    """Until the first microbatch's forward leaves the pivot."""
    steady: float
    """The pivot's other forwards, with one backward for each."""
    ending: float
    """From the pivot's last backward until all gradients are reduced."""

    @property
    def total(self) -> float:
        """The sum of the three."""
        return self.warmup + self.steady + self.ending


def latency(
    phases: Sequence[Phase | tuple[float, float] | tuple[float, float, float]], *, microbatches: int
) -> Latency:
    """The latency of a step from the stages' times F and B and all-reduces R, around the pivot Q:

        warmup = sum of F over stages up to Q
        steady = (microbatches - 1) (F_Q + B_Q)
        ending = max over s of R_s + (sum of B from s to Q if s <= Q, else - sum of B after Q up to s)

    The pivot is the stage with the greatest total, the last among equals. Without all-reduces this is a lower bound for
    any schedule, attained by ``schedules.dapple(policy="B")`` unless a stage is much faster than the next.

    Args:
        phases: stages and the transfers between them, in order.
        microbatches: per step.

    Example:
        >>> latency([(1, 2)] * 4, microbatches=8)
        Latency(pivot=3, warmup=4, steady=21, ending=8.0)

    References:
        Fan et al., DAPPLE, PPoPP 2021 (2007.01045), section 4.1. There stages are compared from the last one on,
        without one microbatch at the pivot so far, so that the estimate can be as much below any real schedule.
    """
    check_positive("cutting.latency", microbatches=microbatches)
    if not phases:
        raise ShardingError("cutting.latency(phases)", found="no stages", required="at least one")
    stages = [Phase(*phase) for phase in phases]
    around = (_with_pivot(pivot, stages, microbatches) for pivot in reversed(range(len(stages))))
    return max(around, key=lambda one: one.total)  # the first among equals


def _with_pivot(pivot: int, stages: Sequence[Phase], microbatches: int) -> Latency:
    """The three phases for one pivot."""
    slowest = stages[pivot]
    ends = list(accumulate(-stage.backward for stage in stages[pivot + 1 :]))
    begins = list(accumulate(stage.backward for stage in stages[pivot::-1]))[::-1]
    return Latency(
        pivot=pivot,
        warmup=sum(stage.forward for stage in stages[: pivot + 1]),
        steady=(microbatches - 1) * (slowest.forward + slowest.backward),
        ending=max(stage.all_reduce + end for stage, end in zip(stages, begins + ends, strict=True)),
    )
