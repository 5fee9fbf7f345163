"""`Chain`: the costs of a chain's steps and the sizes of its states, and what a schedule takes of both."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..errors import ShardingError
from .actions import Action, Advance, Backward, Record
from .replay import Memory, replay


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A chain of steps of unequal costs and sizes.

    Args:
        state_bytes: of states 0 ... n, for n steps: the input, then each step's output.
        record_bytes: of each step's residuals beside its input, with its output. Default: the output alone.
        forward_costs: of each step, in any unit, for example FLOPs.
        backward_costs: of each step.

    Raises:
        ShardingError: lengths that don't fit; sizes or costs that are negative or not finite; fractions of bytes.
    """

    state_bytes: tuple[int, ...]
    record_bytes: tuple[int, ...] = ()
    forward_costs: tuple[float, ...] = ()
    backward_costs: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        states = tuple(self.state_bytes)
        given = {
            "state_bytes": states,
            "record_bytes": tuple(self.record_bytes) or states[1:],
            "forward_costs": tuple(self.forward_costs) or (1.0,) * (len(states) - 1),
            "backward_costs": tuple(self.backward_costs) or (1.0,) * (len(states) - 1),
        }
        for name, values in given.items():
            object.__setattr__(self, name, values)
            _check(name, values, len(states) if name == "state_bytes" else len(states) - 1, name.endswith("bytes"))

    @property
    def steps(self) -> int:
        """The number of steps."""
        return len(self.record_bytes)

    def cost(self, actions: Sequence[Action]) -> float:
        """The costs of a schedule's runs of steps, forward and backward."""
        recorded = {action.step for action in actions if isinstance(action, Record)}
        return math.fsum(cost for action in actions for cost in self._costs(action, recorded))

    def _costs(self, action: Action, recorded: set[int]) -> Iterator[float]:
        match action:
            case Advance(start, stop):
                yield from self.forward_costs[start:stop]
            case Record(step):
                yield self.forward_costs[step]
            case Backward(step):
                yield self.backward_costs[step]
                if step not in recorded:
                    yield self.forward_costs[step]

    def bytes_during(self, name: str, actions: Sequence[Action]) -> Iterator[int]:
        """The bytes on the device during each action.

        Held are snapshots, records, the states that the action reads and writes, and the gradient of the last state
        whose backward is to come, which is as large as that state (before the first backward: the output).

        Raises:
            ShardingError: a schedule that can't run.
        """
        held, recorded = 0, set[int]()
        for _, action, memory in replay(name, self.steps, actions):
            after = self._held(memory)
            yield max(held, after) + self._transient(action, memory, recorded)
            held, recorded = after, set(memory.recorded)

    def _held(self, memory: Memory) -> int:
        """Bytes of snapshots and records on the device. A record needs its step's input, which others may hold, too."""
        snapshots = sum(self.state_bytes[s] for s, place in memory.stored.items() if place == "device")
        return snapshots + sum(self.record_bytes[step] + self._read(step, memory) for step in memory.recorded)

    def _transient(self, action: Action, memory: Memory, recorded: set[int]) -> int:
        """Bytes beside those that are held before or after the action, given the steps recorded before it."""
        gradient = self.state_bytes[memory.next_backward + 1]
        match action:
            case Advance(start, stop):
                moves = [self._read(start, memory) + self.state_bytes[start + 1]]
                moves += [self.state_bytes[i] + self.state_bytes[i + 1] for i in range(start + 1, stop)]
                return gradient + max(moves)
            case Backward(step) if step in recorded:
                return gradient + self.state_bytes[step + 1]
            case Backward(step):
                own = self.record_bytes[step] + self._read(step, memory)
                return gradient + self.state_bytes[step + 1] + own
            case _:
                return gradient

    def _read(self, state: int, memory: Memory) -> int:
        """Bytes of a state that is read and not held."""
        return 0 if memory.stored.get(state) == "device" or state - 1 in memory.recorded else self.state_bytes[state]


def _check(name: str, values: Sequence[float], length: int, whole: bool) -> None:
    """Raises unless all values are sizes or costs, one for each state or step."""
    asked = f"remat.Chain({name})"
    if len(values) != length or length < (2 if name == "state_bytes" else 1):
        required = f"{length} values, one per step" if name != "state_bytes" else "the input and each step's output"
        raise ShardingError(asked, found=f"{len(values)} values", required=required)
    bad = [i for i, v in enumerate(values) if not (math.isfinite(v) and v >= 0 and (not whole or v == int(v)))]
    if bad:
        found = [f"[{i}] = {values[i]!r}" for i in bad[:5]]
        raise ShardingError(asked, found=found, required=f"{'whole' if whole else 'finite'} numbers of at least 0")
