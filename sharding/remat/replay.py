"""`replay`: what is held while a schedule's actions run, and the errors of schedules that can't run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field

from ..errors import ShardingError
from .actions import Action, Advance, Backward, Free, Place, Record, Restore, Snapshot


@dataclass(slots=True)
class Memory:
    """What is held at one moment. The same object changes from action to action."""

    at_hand: int | None
    """The state that the next action may start from."""
    next_backward: int
    """The step whose backward is next."""
    stored: dict[int, Place] = field(default_factory=dict)
    """The snapshots, oldest first."""
    recorded: dict[int, None] = field(default_factory=dict)
    """The steps whose residuals are held, oldest first."""

    @property
    def num_held(self) -> int:
        """Snapshots and records."""
        return len(self.stored) + len(self.recorded)


def replay(name: str, steps: int, actions: Sequence[Action]) -> Iterator[tuple[int, Action, Memory]]:
    """Each action with its position, and the memory after it.

    Raises:
        ShardingError: an action that can't run, with its position; a step that never runs backward; a state that stays
            stored.
    """
    memory = Memory(at_hand=0, next_backward=steps - 1)
    for number, action in enumerate(actions):
        required = _missing(action, memory, steps)
        if required:
            raise _error(name, number, action, memory, required)
        _run(action, memory)
        yield number, action, memory
    if memory.next_backward >= 0 or memory.num_held:
        raise ShardingError(
            f"{name}: the end of the schedule",
            found=_held(memory),
            required="the backward of every step, and nothing held",
            fix=f"add backward {memory.next_backward}" if memory.next_backward >= 0 else "free what is held",
        )


def _missing(action: Action, memory: Memory, steps: int) -> str:
    """What an action lacks; empty if it can run."""
    match action:
        case Advance(start, stop):
            return _unless(
                memory.at_hand == start < stop <= steps, f"state {start} at hand, and a later state <= {steps}"
            )
        case Snapshot(state):
            return _unless(memory.at_hand == state not in memory.stored, f"state {state} at hand, and not yet stored")
        case Restore(state, place):
            found = memory.stored.get(state) == place or (place == "device" and state - 1 in memory.recorded)
            return _unless(found, f"state {state} on {place}, stored or part of a record")
        case Free(state, place):
            return _unless(memory.stored.get(state) == place, f"state {state} stored on {place}")
        case Record(step):
            return _unless(memory.at_hand == step < steps and step <= memory.next_backward, f"state {step} at hand")
        case Backward(step):
            found = step == memory.next_backward and (step in memory.recorded or memory.at_hand == step)
            return _unless(found, f"step {memory.next_backward} next, and recorded or its state at hand")


def _unless(holds: bool, required: str) -> str:
    return "" if holds else required


def _run(action: Action, memory: Memory) -> None:
    match action:
        case Advance(_, stop):
            memory.at_hand = stop
        case Snapshot(state, place):
            memory.stored[state] = place
        case Restore(state):
            memory.at_hand = state
        case Free(state):
            del memory.stored[state]
        case Record(step):
            memory.recorded[step] = None
            memory.at_hand = step + 1
        case Backward(step):
            memory.recorded.pop(step, None)
            memory.at_hand, memory.next_backward = None, step - 1


def _error(name: str, number: int, action: Action, memory: Memory, required: str) -> ShardingError:
    return ShardingError(f"{name}: action {number}, {action}", found=_held(memory), required=required)


def _held(memory: Memory) -> str:
    at_hand = "no state" if memory.at_hand is None else f"state {memory.at_hand}"
    return f"{at_hand} at hand, stored {_few(memory.stored.keys())}, recorded {_few(memory.recorded.keys())}"


def _few(numbers: Set[int]) -> str:
    listed = sorted(numbers)
    text = ", ".join(map(str, listed[:8])) or "none"
    return text + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")
