"""How the order of one device is put together."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest

from ..table import Kind, Task

Step = tuple[Kind, int]
"""(kind, stage): a task whose microbatch is the next one that this stage does so."""


def alternating(forwards: Sequence[Task], backwards: Sequence[Task], ahead: int) -> list[Task]:
    """So many forwards, then a backward and a forward in turn (1F1B), then the backwards that are left."""
    turns = zip_longest(backwards, forwards[ahead:])
    return [*forwards[:ahead], *(task for turn in turns for task in turn if task is not None)]


def one_forward_one_backward(
    ahead: Sequence[int],
    microbatches: int,
    *,
    backward: Kind = "backward",
    version: Callable[[int, int], int] = lambda stage, microbatch: 0,
) -> list[list[Task]]:
    """Per device the order of its one stage, which sends so many microbatches ahead.

    Args:
        ahead: per stage, at least 1.
        microbatches: all of them.
        backward: whole or for the input.
        version: of the weights, given (stage, microbatch).
    """

    def tasks(kind: Kind, stage: int) -> list[Task]:
        return [Task(kind, stage, m, version=version(stage, m)) for m in range(microbatches)]

    return [alternating(tasks("forward", s), tasks(backward, s), count) for s, count in enumerate(ahead)]


def with_weights(order: Iterable[Task], delay: int) -> Iterator[Task]:
    """After each backward-input the oldest backward-weight if more than ``delay`` wait; at the end the rest."""
    waiting: deque[Task] = deque()
    for task in order:
        yield task
        if task.kind == "backward-input":
            waiting.append(task._replace(kind="backward-weight"))
            if len(waiting) > delay:
                yield waiting.popleft()
    yield from waiting


def numbered(steps: Iterable[Step], microbatches: int) -> Iterator[Task]:
    """The tasks of steps, those left out whose microbatch there isn't.

    A stage's microbatches come in their order, forward and backward; a backward-weight is that of the oldest
    backward-input that still waits for one.
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
