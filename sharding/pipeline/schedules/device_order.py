"""Building blocks for the task order of one device."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest

from ..task_table import Kind, Task

Step = tuple[Kind, int]
"""(kind, stage): the stage's next microbatch in this kind of task."""


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


def with_weight_tasks(order: Iterable[Task], delay: int) -> Iterator[Task]:
    """Inserts the oldest pending backward-weight when more than ``delay`` are pending; the rest run at the end."""
    waiting: deque[Task] = deque()
    for task in order:
        yield task
        if task.kind == "backward-input":
            waiting.append(task._replace(kind="backward-weight"))
            if len(waiting) > delay:
                yield waiting.popleft()
    yield from waiting


def with_microbatches(steps: Iterable[Step], microbatches: int) -> Iterator[Task]:
    """The tasks of steps, without those past the last microbatch.

    A stage takes its microbatches in order, forward and backward; a backward-weight belongs to the oldest
    backward-input that lacks one.
    """
    forwards: Counter[int] = Counter()
    backwards: Counter[int] = Counter()
    waiting: deque[Task] = deque()
    for kind, stage in steps:
        if kind == "backward-weight":
            task = waiting.popleft()._replace(kind=kind)
        else:
            count = forwards if kind == "forward" else backwards
            task = Task(kind, stage, count[stage])
            count[stage] += 1
        if kind == "backward-input":
            waiting.append(task)
        if task.microbatch < microbatches:
            yield task
