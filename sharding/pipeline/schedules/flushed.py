"""A stage per device, one update at the end of a step, the same gradient as without a pipeline: GPipe and 1F1B."""

from __future__ import annotations

from typing import Literal

from ...errors import ShardingError
from ..schedule import Schedule
from ..table import Task, at_least_one
from .order import one_forward_one_backward


def gpipe(*, stages: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards, the last microbatch first.

    Idle (stages - 1) / (microbatches + stages - 1) of the time; every device holds all microbatches' activations.

    References:
        Huang et al., GPipe, NeurIPS 2019 (1811.06965), section 2.
    """
    at_least_one("schedules.gpipe", stages=stages, microbatches=microbatches)
    numbers = range(microbatches)
    orders = [
        [*(Task("forward", stage, m) for m in numbers), *(Task("backward", stage, m) for m in reversed(numbers))]
        for stage in range(stages)
    ]
    return Schedule(name="gpipe", orders=orders, stages=stages, microbatches=microbatches)


def one_f_one_b(*, stages: int, microbatches: int) -> Schedule:
    """As many microbatches ahead as there are stages from here on, then a backward and a forward in turn.

    As long as GPipe, but stage s holds min(stages - s, microbatches) activations, however many microbatches there are.

    References:
        Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training, ICML 2021 (2006.09503), section 3.2:
        PipeDream-Flush. The same as ``dapple(policy="A")``.
    """
    at_least_one("schedules.one_f_one_b", stages=stages, microbatches=microbatches)
    return _flushed("one_f_one_b", microbatches, [stages - stage for stage in range(stages)])


def eager_1f1b(*, stages: int, microbatches: int) -> Schedule:
    """1F1B with up to twice as many microbatches ahead, so that sending hides behind computing.

    Stage s holds min(2 (stages - s) - 1, microbatches) activations.

    References:
        Zhuang et al., On Optimizing the Communication of Model Parallelism, MLSys 2023 (2211.05322), section 4. The
        same as ``dapple(policy="B")``.
    """
    at_least_one("schedules.eager_1f1b", stages=stages, microbatches=microbatches)
    return _flushed("eager_1f1b", microbatches, [2 * (stages - stage) - 1 for stage in range(stages)])


def dapple(
    *, stages: int, microbatches: int, policy: Literal["A", "B"] = "A", most_in_flight: int | None = None
) -> Schedule:
    """Early backward scheduling: K microbatches ahead, then a backward and a forward in turn.

    Args:
        stages: one per device.
        microbatches: of a step.
        policy: ``"A"``, K = stages - s at stage s; ``"B"``, K = 2 (stages - s) - 1, for slow links.
        most_in_flight: the most activations that fit a device; K is at most that.

    References:
        Fan et al., DAPPLE, PPoPP 2021 (2007.01045), section 3.
    """
    most = microbatches if most_in_flight is None else most_in_flight
    at_least_one("schedules.dapple", stages=stages, microbatches=microbatches, most_in_flight=most)
    if policy not in ("A", "B"):
        raise ShardingError("schedules.dapple(policy)", there=repr(policy), must="'A' or 'B'")
    ahead = [stages - stage if policy == "A" else 2 * (stages - stage) - 1 for stage in range(stages)]
    return _flushed("dapple", microbatches, [min(count, most) for count in ahead])


def _flushed(name: str, microbatches: int, ahead: list[int]) -> Schedule:
    """A step in which each stage sends so many microbatches ahead."""
    orders = one_forward_one_backward(ahead, microbatches)
    return Schedule(name=name, orders=orders, stages=len(ahead), microbatches=microbatches)
