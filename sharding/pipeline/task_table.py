"""A pipeline schedule as data: the ordered tasks of each device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from ..errors import ShardingError

Kind = Literal["forward", "backward", "backward-input", "backward-weight"]
"""`backward` computes both gradients; `backward-input` and `backward-weight` compute one each, separately."""

KINDS: tuple[Kind, ...] = get_args(Kind)
LETTERS: dict[Kind, str] = {"forward": "F", "backward": "B", "backward-input": "I", "backward-weight": "W"}


class Task(NamedTuple):
    """One unit of work of a device: a microbatch, or a slice of its tokens, through one stage in one direction."""

    kind: Kind
    stage: int
    """From 0, in model order."""
    microbatch: int
    slice: int = 0
    """Of the tokens, where the schedule slices sequences."""
    version: int = 0
    """Of the stage's weights: the number of updates applied to them."""

    def __str__(self) -> str:
        part = f", slice {self.slice}," if self.slice else ""
        return f"{self.kind} of microbatch {self.microbatch}{part} at stage {self.stage}"

    @property
    def label(self) -> str:
        """A letter and the microbatch: F forward, B backward, I backward-input, W backward-weight."""
        return f"{LETTERS.get(self.kind, '?')}{self.microbatch}{'.' + str(self.slice) if self.slice else ''}"

    @property
    def sends_gradient(self) -> bool:
        """Whether it produces the gradient that the previous stage needs."""
        return self.kind in ("backward", "backward-input")

    @property
    def frees_activation(self) -> bool:
        """Whether it is the last task of this microbatch at this stage."""
        return self.kind in ("backward", "backward-weight")

    def parts(self) -> tuple[Task, ...]:
        """A backward as backward-input and backward-weight; any other task unchanged."""
        if self.kind != "backward":
            return (self,)
        return (self._replace(kind="backward-input"), self._replace(kind="backward-weight"))


class Located(NamedTuple):
    """A task with its device and its position in the device's order."""

    task: Task
    device: int
    position: int
    """From 0."""

    def __str__(self) -> str:
        return f"{self.task} (device {self.device}, position {self.position})"


@dataclass(frozen=True, kw_only=True)
class TaskTable:
    """The tasks of one step, or of a run without flushes, in order per device."""

    name: str
    orders: Sequence[Sequence[Task]]
    """Per device, its tasks in execution order."""
    stages: int
    """Stages of the model; a device may run several, and a stage may run on several devices."""
    microbatches: int
    slices: int = 1
    """Slices of each microbatch's tokens."""
    chunks: int = 1
    """Virtual stages per device: a stage takes 1/chunks of the time given for a device's part of the model."""
    microbatches_per_update: int = 0
    """Microbatches between weight updates; defaults to all of them: one update, after a flush."""

    def __post_init__(self) -> None:
        """Converts sequences to tuples.

        Raises:
            ShardingError: a size below 1, or a device without tasks.
        """
        per_update = self.microbatches_per_update or self.microbatches
        object.__setattr__(self, "microbatches_per_update", per_update)
        object.__setattr__(self, "orders", tuple(tuple(Task(*task) for task in order) for order in self.orders))
        check_positive(
            f"schedule {self.name!r}",
            devices=len(self.orders),
            stages=self.stages,
            microbatches=self.microbatches,
            slices=self.slices,
            chunks=self.chunks,
            microbatches_per_update=per_update,
        )
        if idle := [device for device, order in enumerate(self.orders) if not order]:
            required = "at least one task per device"
            raise ShardingError(f"schedule {self.name!r}", found=f"no task on device {idle[0]}", required=required)

    @property
    def devices(self) -> int:
        """Number of devices."""
        return len(self.orders)

    @property
    def placement(self) -> tuple[tuple[int, ...], ...]:
        """Per device, its stages in model order."""
        return tuple(tuple(sorted({task.stage for task in order})) for order in self.orders)

    @property
    def units(self) -> int:
        """Microbatches, or slices of microbatches: what passes through a stage in one task."""
        return self.microbatches * self.slices

    def unit(self, task: Task) -> int:
        """The index of a task's microbatch, or of its slice, with the slices of a microbatch adjacent."""
        return task.microbatch * self.slices + task.slice

    @property
    def share(self) -> float:
        """The fraction that one task is of a full microbatch through a device's part of the model."""
        return 1 / (self.chunks * self.slices)

    def located(self) -> Iterator[Located]:
        """All tasks, device by device, with their positions."""
        for device, order in enumerate(self.orders):
            yield from (Located(task, device, position) for position, task in enumerate(order))


def check_positive(asked: str, **numbers: int) -> None:
    """Raises a ShardingError naming the numbers that are not positive integers."""
    bad = {name: value for name, value in numbers.items() if not is_integer(value) or value < 1}
    if bad:
        raise ShardingError(
            asked,
            found=[f"{name}={value!r}" for name, value in bad.items()],
            required="positive integers",
            fix=[f"{name}=1 or more" for name in bad],
        )


def check_multiple(asked: str, microbatches: int, unit: int, *, required: str) -> None:
    """Raises a ShardingError with the next valid number unless `microbatches` is a multiple of `unit`."""
    if rest := microbatches % unit:
        raise ShardingError(
            f"{asked}(microbatches)",
            found=f"{microbatches} % {unit} = {rest}",
            required=required,
            fix=f"microbatches={microbatches + unit - rest}",
        )


def is_integer(value: object) -> bool:
    """Whether a value is an int, and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def positions_text(located: Iterable[Located]) -> str:
    """Positions of tasks: "device 0, position 3 and device 1, position 5"."""
    return " and ".join(f"device {one.device}, position {one.position}" for one in located)
