"""Sequences in slices that follow each other through the stages: TeraPipe."""

from __future__ import annotations

from ..schedule import Schedule
from ..table import Kind, Task, at_least_one


def terapipe(*, stages: int, microbatches: int, slices: int | None = None) -> Schedule:
    """All slices forward, microbatch by microbatch, then all backward, the last one first.

    In a causal model a slice of the tokens needs only slices before it: their keys and values at each stage, and on the
    way back the gradients of those from the slices after it. With slice times t on every stage a step takes sum(t) +
    (stages - 1) max(t); ``pipeline.token_slices`` finds the lengths for which that is least.

    Args:
        stages: one per device.
        microbatches: each of one or more whole sequences.
        slices: per microbatch; ``stages`` where it is not given. ``simulate`` takes them as equal where times are
            numbers; the times of others are told to it as a function of the task.

    References:
        Li et al., TeraPipe, ICML 2021 (2102.07988), section 3.2.
    """
    count = stages if slices is None else slices
    at_least_one("schedules.terapipe", stages=stages, microbatches=microbatches, slices=count)

    def tasks(kind: Kind, stage: int) -> list[Task]:
        return [Task(kind, stage, m, part) for m in range(microbatches) for part in range(count)]

    orders = [[*tasks("forward", stage), *reversed(tasks("backward", stage))] for stage in range(stages)]
    return Schedule(name="terapipe", orders=orders, stages=stages, microbatches=microbatches, slices=count)
