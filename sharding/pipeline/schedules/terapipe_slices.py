"""TeraPipe: token-level pipelining of slices of each sequence."""

from __future__ import annotations

from ..schedule import Schedule
from ..task_table import Kind, Task, check_positive


def terapipe(*, stages: int, microbatches: int, slices: int | None = None) -> Schedule:
    """TeraPipe: all slices forward, microbatch by microbatch, then all backward in reverse order.

    In a causal model a slice of the tokens depends only on earlier slices: on their keys and values at each stage, and
    in the backward on the gradients of its own from later slices. With slice times t on every stage a step takes
    sum(t) + (stages - 1) max(t); ``pipeline.token_slices`` finds the lengths that minimise it.

    Args:
        stages: one per device.
        microbatches: each of one or more full sequences.
        slices: per microbatch; defaults to ``stages``. ``simulate`` takes times that are numbers as those of equal
            slices; for unequal slices, give it a function of the task.

    References:
        Li et al., TeraPipe, ICML 2021 (2102.07988), section 3.2.
    """
    count = stages if slices is None else slices
    check_positive("schedules.terapipe", stages=stages, microbatches=microbatches, slices=count)

    def tasks(kind: Kind, stage: int) -> list[Task]:
        return [Task(kind, stage, m, part) for m in range(microbatches) for part in range(count)]

    orders = [[*tasks("forward", stage), *reversed(tasks("backward", stage))] for stage in range(stages)]
    return Schedule(name="terapipe", orders=orders, stages=stages, microbatches=microbatches, slices=count)
