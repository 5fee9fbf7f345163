"""Several chunks of the model per device, one after the other around the ring: Megatron's interleaved 1F1B."""

from __future__ import annotations

from ..schedule import Schedule
from ..table import Kind, Task, at_least_one, whole_units
from .order import alternating


def interleaved(*, stages: int, microbatches: int, chunks: int = 2) -> Schedule:
    """1F1B over ``chunks`` smaller stages per device, of which device d has d, d + stages, d + 2 stages, ...

    Idle time falls to 1/chunks of that of 1F1B; what travels grows by ``chunks``.

    Args:
        stages: how many devices the model is cut for; the schedule has stages * chunks stages.
        microbatches: a multiple of ``stages``.
        chunks: per device.

    References:
        Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, SC 2021 (2104.04473), section
        2.2.
    """
    at_least_one("schedules.interleaved", stages=stages, microbatches=microbatches, chunks=chunks)
    must = "microbatches is a multiple of stages: devices take turns over groups of so many"
    whole_units("schedules.interleaved", microbatches, stages, must=must)

    def task(kind: Kind, device: int, number: int) -> Task:
        """The device's task of this number: groups of microbatches, in each the chunks, in each the microbatches."""
        group, rest = divmod(number, stages * chunks)
        chunk, member = divmod(rest, stages)
        chunk = chunk if kind == "forward" else chunks - 1 - chunk
        return Task(kind, chunk * stages + device, group * stages + member)

    def order(device: int) -> list[Task]:
        count = microbatches * chunks
        ahead = 2 * (stages - device - 1) + (chunks - 1) * stages + 1
        forwards, backwards = ([task(kind, device, n) for n in range(count)] for kind in ("forward", "backward"))
        return alternating(forwards, backwards, count if microbatches == stages else ahead)

    return Schedule(
        name="interleaved",
        orders=[order(device) for device in range(stages)],
        stages=stages * chunks,
        microbatches=microbatches,
        chunks=chunks,
    )
