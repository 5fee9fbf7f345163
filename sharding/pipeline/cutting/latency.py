"""What a step with a flush takes by its slowest stage: DAPPLE's estimate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from ...errors import ShardingError
from ..table import at_least_one


class Phase(NamedTuple):
    """A stage, or the transfer between two, which is a stage of its own: times of one microbatch, and of one step."""

    forward: float
    backward: float
    all_reduce: float = 0.0
    """Of the stage's gradients between its devices, once at the end."""


@dataclass(frozen=True, kw_only=True)
class Latency:
    """The time of a step in three parts, around the pivot: the stage that is busy from its first task to its last."""

    pivot: int
    """From 0, in the order of the phases."""
    warmup: float
    """Until the first microbatch has been forward through the pivot."""
    steady: float
    """In which the pivot does the others, and one backward for each."""
    ending: float
    """From the pivot's last backward until all gradients are there."""

    @property
    def total(self) -> float:
        """All three."""
        return self.warmup + self.steady + self.ending


def latency(
    phases: Sequence[Phase | tuple[float, float] | tuple[float, float, float]], *, microbatches: int
) -> Latency:
    """What a step takes with its stages' times F and B and all-reduces R, around the pivot Q:

        warmup = sum of F over stages up to Q
        steady = (microbatches - 1) (F_Q + B_Q)
        ending = max over s of R_s + (sum of B from s to Q if s <= Q, else - sum of B after Q up to s)

    The pivot is the stage for which the whole is longest, the last of equals. Without all-reduces no schedule takes
    less, and ``schedules.dapple(policy="B")`` takes just this where no stage is much faster than the next.

    Args:
        phases: the stages, and between them the transfers, in order.
        microbatches: of a step.

    Example:
        >>> latency([(1, 2)] * 4, microbatches=8)
        Latency(pivot=3, warmup=4, steady=21, ending=8.0)

    References:
        Fan et al., DAPPLE, PPoPP 2021 (2007.01045), section 4.1. There stages are compared from the last one on,
        without one microbatch at the pivot so far, so that the whole may come out as much shorter than any schedule is.
    """
    at_least_one("cutting.latency", microbatches=microbatches)
    if not phases:
        raise ShardingError("cutting.latency(phases)", there="no stages", must="at least one")
    stages = [Phase(*phase) for phase in phases]
    around = (_around(pivot, stages, microbatches) for pivot in reversed(range(len(stages))))
    return max(around, key=lambda one: one.total)  # the first of equals


def _around(pivot: int, stages: Sequence[Phase], microbatches: int) -> Latency:
    """The three parts for one pivot."""
    slowest = stages[pivot]
    ends = list(accumulate(-stage.backward for stage in stages[pivot + 1 :]))
    begins = list(accumulate(stage.backward for stage in stages[pivot::-1]))[::-1]
    return Latency(
        pivot=pivot,
        warmup=sum(stage.forward for stage in stages[: pivot + 1]),
        steady=(microbatches - 1) * (slowest.forward + slowest.backward),
        ending=max(stage.all_reduce + end for stage, end in zip(stages, begins + ends, strict=True)),
    )
