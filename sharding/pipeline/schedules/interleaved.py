"""Megatron's interleaved 1F1B: several model chunks (virtual stages) per device, round-robin over the devices."""

from __future__ import annotations

from ..schedule import Schedule
from ..task_table import Kind, Task, check_multiple, check_positive
from .device_order import warmup_then_1f1b


def interleaved(*, stages: int, microbatches: int, chunks: int = 2) -> Schedule:
    """1F1B over ``chunks`` virtual stages per device; device d runs d, d + stages, d + 2 stages, ...

    The bubble shrinks to 1/chunks of 1F1B's; communication grows by ``chunks``.

    Args:
        stages: the pipeline-parallel size; the schedule has stages * chunks stages.
        microbatches: a multiple of ``stages``.
        chunks: virtual stages per device.

    References:
        Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, SC 2021 (2104.04473), section
        2.2.
    """
    check_positive("schedules.interleaved", stages=stages, microbatches=microbatches, chunks=chunks)
    must = "a multiple of stages: a device runs groups of that size through each of its chunks"
    check_multiple("schedules.interleaved", microbatches, stages, required=must)

    def task(kind: Kind, device: int, number: int) -> Task:
        """The n-th task of a device: by group of microbatches, then by chunk, then by microbatch."""
        group, rest = divmod(number, stages * chunks)
        chunk, member = divmod(rest, stages)
        chunk = chunk if kind == "forward" else chunks - 1 - chunk
        return Task(kind, chunk * stages + device, group * stages + member)

    def order(device: int) -> list[Task]:
        count = microbatches * chunks
        warmup = 2 * (stages - device - 1) + (chunks - 1) * stages + 1
        forwards, backwards = ([task(kind, device, n) for n in range(count)] for kind in ("forward", "backward"))
        return warmup_then_1f1b(forwards, backwards, count if microbatches == stages else warmup)

    return Schedule(
        name="interleaved",
        orders=[order(device) for device in range(stages)],
        stages=stages * chunks,
        microbatches=microbatches,
        chunks=chunks,
    )
