"""GPipe, 1F1B and DAPPLE: one stage per device, one update after a flush, gradients as without a pipeline."""

from __future__ import annotations

from typing import Literal

from ...errors import ShardingError
from ..schedule import Schedule
from ..task_table import Task, check_positive
from .device_order import one_forward_one_backward


def gpipe(*, stages: int, microbatches: int) -> Schedule:
    """GPipe: all forwards, then all backwards in reverse order.

    Bubble fraction (stages - 1) / (microbatches + stages - 1); every device stashes all microbatches' activations.

    References:
        Huang et al., GPipe, NeurIPS 2019 (1811.06965), section 2.
    """
    check_positive("schedules.gpipe", stages=stages, microbatches=microbatches)
    numbers = range(microbatches)
    orders = [
        [*(Task("forward", stage, m) for m in numbers), *(Task("backward", stage, m) for m in reversed(numbers))]
        for stage in range(stages)
    ]
    return Schedule(name="gpipe", orders=orders, stages=stages, microbatches=microbatches)


def one_f_one_b(*, stages: int, microbatches: int) -> Schedule:
    """1F1B: stage s warms up with stages - s forwards, then alternates backwards and forwards.

    Same makespan as GPipe, but stage s stashes min(stages - s, microbatches) activations.

    References:
        Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training, ICML 2021 (2006.09503), section 3.2:
        PipeDream-Flush. The same as ``dapple(policy="A")``.
    """
    check_positive("schedules.one_f_one_b", stages=stages, microbatches=microbatches)
    return _with_flush("one_f_one_b", microbatches, [stages - stage for stage in range(stages)])


def eager_1f1b(*, stages: int, microbatches: int) -> Schedule:
    """1F1B with a warm-up of up to twice as many microbatches, to overlap communication with compute.

    Stage s stashes min(2 (stages - s) - 1, microbatches) activations.

    References:
        Zhuang et al., On Optimizing the Communication of Model Parallelism, MLSys 2023 (2211.05322), section 4. The
        same as ``dapple(policy="B")``.
    """
    check_positive("schedules.eager_1f1b", stages=stages, microbatches=microbatches)
    return _with_flush("eager_1f1b", microbatches, [2 * (stages - stage) - 1 for stage in range(stages)])


def dapple(
    *, stages: int, microbatches: int, policy: Literal["A", "B"] = "A", most_in_flight: int | None = None
) -> Schedule:
    """DAPPLE's early backward scheduling: a warm-up of K forwards, then alternating backwards and forwards.

    Args:
        stages: one per device.
        microbatches: of a step.
        policy: ``"A"``, K = stages - s at stage s; ``"B"``, K = 2 (stages - s) - 1, for slow links.
        most_in_flight: maximum activations that fit on a device; an upper bound on K.

    References:
        Fan et al., DAPPLE, PPoPP 2021 (2007.01045), section 3.
    """
    most = microbatches if most_in_flight is None else most_in_flight
    check_positive("schedules.dapple", stages=stages, microbatches=microbatches, most_in_flight=most)
    if policy not in ("A", "B"):
        raise ShardingError("schedules.dapple(policy)", found=repr(policy), required="'A' or 'B'")
    warmup = [stages - stage if policy == "A" else 2 * (stages - stage) - 1 for stage in range(stages)]
    return _with_flush("dapple", microbatches, [min(count, most) for count in warmup])


def _with_flush(name: str, microbatches: int, warmup: list[int]) -> Schedule:
    """A step with a flush, with `warmup[s]` forwards in the warm-up of stage s."""
    orders = one_forward_one_backward(warmup, microbatches)
    return Schedule(name=name, orders=orders, stages=len(warmup), microbatches=microbatches)
