"""Building blocks for the task order of one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest

from ..task_table import Kind, Task


def warmup_then_1f1b(forwards: Sequence[Task], backwards: Sequence[Task], warmup: int) -> list[Task]:
    """1F1B: `warmup` forwards to warm up, then alternating backwards and forwards, then the remaining backwards."""
    turns = zip_longest(backwards, forwards[warmup:])
    return [*forwards[:warmup], *(task for turn in turns for task in turn if task is not None)]


def one_forward_one_backward(
    warmup: Sequence[int],
    microbatches: int,
    *,
    backward: Kind = "backward",
    version: Callable[[int, int], int] = lambda stage, microbatch: 0,
) -> list[list[Task]]:
    """The 1F1B order of each device, one stage per device.

    Args:
        warmup: warm-up forwards per stage, at least 1.
        microbatches: of the schedule.
        backward: the full backward or ``"backward-input"``.
        version: of the weights, from (stage, microbatch).
    """

    def tasks(kind: Kind, stage: int) -> list[Task]:
        return [Task(kind, stage, m, version=version(stage, m)) for m in range(microbatches)]

    return [warmup_then_1f1b(tasks("forward", s), tasks(backward, s), count) for s, count in enumerate(warmup)]
