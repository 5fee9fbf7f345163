"""Schedules as nested blocks: a block runs forward without residuals, and again before its backward.

`Blocks` is what executors need of a schedule: `jax.checkpoint` of a block, in the order of the steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..errors import ShardingError
from .actions import Action, Advance, Backward, Free, Place, Record, Restore, Snapshot
from .replay import Memory, replay


@dataclass(slots=True)
class Block:
    """Steps `start` ... `stop - 1`: single steps, whose residuals are kept, and blocks that run again."""

    start: int
    stop: int
    parts: list[int | Block]
    place: Place = "device"
    """Where the state before it waits."""


def segments(starts: Sequence[int], steps: int) -> Block:
    """A block from each start to the next one; the steps from the last start on keep their residuals."""
    *others, last = [list(range(a, b)) for a, b in zip(starts, [*starts[1:], steps], strict=True)]
    return Block(0, steps, [*(Block(own[0], own[-1] + 1, list(own)) for own in others), *last])


def actions(whole: Block) -> Iterator[Action]:
    """The actions of nested blocks: the state before and the state after a block are stored while they are needed."""
    yield Snapshot(0)
    waiting: list[Action | Block] = [Free(0), whole]
    while waiting:
        item = waiting.pop()
        if isinstance(item, Block):
            yield from _forward(item.parts)
            waiting += reversed(list(_backward(item.parts)))
        else:
            yield item


def _forward(parts: Sequence[int | Block]) -> Iterator[Action]:
    for place, part in enumerate(parts):
        if _follows_block(parts, place):
            yield Snapshot(_start(part))
        yield Advance(part.start, part.stop) if isinstance(part, Block) else Record(part)


def _backward(parts: Sequence[int | Block]) -> Iterator[Action | Block]:
    for place in reversed(range(len(parts))):
        part = parts[place]
        if isinstance(part, Block):
            yield Restore(part.start)
            yield part
        else:
            yield Backward(part)
        if _follows_block(parts, place):
            yield Free(_start(part))


def _follows_block(parts: Sequence[int | Block], place: int) -> bool:
    """Whether no record and no earlier snapshot has the state before this part."""
    return place > 0 and isinstance(parts[place - 1], Block)


def _start(part: int | Block) -> int:
    return part.start if isinstance(part, Block) else part


def nested(name: str, steps: int, given: Sequence[Action]) -> Block:
    """The nested blocks of a schedule.

    Raises:
        ShardingError: a schedule that can't run, or whose snapshots are not each kept until the backward of the step
            after it: it has no such form.
    """
    reader = _Reader(name, [Block(0, steps, [])], [0])
    for number, action, memory in replay(name, steps, given):
        reader.read(number, action, memory)
    return reader.blocks[0]


@dataclass(slots=True)
class _Reader:
    """Blocks that are read, each with the number of its parts whose backward is still to come."""

    name: str
    blocks: list[Block]
    left: list[int]

    def read(self, number: int, action: Action, memory: Memory) -> None:
        block = self.blocks[-1]
        match action:
            case Advance(start, stop):
                last = block.parts[-1] if block.parts else None
                if isinstance(last, Block) and last.stop == start and start not in memory.stored:
                    last.stop = stop
                else:
                    self._append(number, action, Block(start, stop, []))
            case Record(step):
                self._append(number, action, step)
            case Restore(state, place):
                last = block.parts[self.left[-1] - 1] if self.left[-1] else None
                if not (isinstance(last, Block) and last.start == state):
                    raise self._error(number, action)
                last.place = place
                self.blocks.append(last)
                self.left.append(0)
            case Backward(step):
                if not (self.left[-1] and block.parts[self.left[-1] - 1] == step):
                    self._append(number, action, step)
                self._done()

    def _append(self, number: int, action: Action, part: int | Block) -> None:
        if self.left[-1] < len(self.blocks[-1].parts):
            raise self._error(number, action)
        self.blocks[-1].parts.append(part)
        self.left[-1] += 1

    def _done(self) -> None:
        self.left[-1] -= 1
        while self.left[-1] == 0 and len(self.left) > 1:
            self.left.pop()
            self.blocks.pop()
            self.left[-1] -= 1

    def _error(self, number: int, action: Action) -> ShardingError:
        return ShardingError(
            f"{self.name}: action {number}, {action}",
            found="states that were dropped while steps after them had no backward yet",
            required="each snapshot kept until the backward of the step after it",
            fix=["remat.revolve(steps, snapshots)", "remat.rotor(...)"],
        )
