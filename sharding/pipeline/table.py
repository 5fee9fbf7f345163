"""A pipeline schedule as data: which device does which task, and in which order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from ..errors import ShardingError

Kind = Literal["forward", "backward", "backward-input", "backward-weight"]
"""`backward` is the whole of it; `backward-input` and `backward-weight` are its parts, which can be done apart."""

KINDS: tuple[Kind, ...] = get_args(Kind)
LETTERS: dict[Kind, str] = {"forward": "F", "backward": "B", "backward-input": "I", "backward-weight": "W"}


class Task(NamedTuple):
    """What a device does at a time: one microbatch, or a slice of its tokens, through one stage, one way."""

    kind: Kind
    stage: int
    """From 0, in the order of the model."""
    microbatch: int
    slice: int = 0
    """Of the tokens, where the schedule cuts sequences."""
    version: int = 0
    """Of the stage's weights: how many updates they have had."""

    def __str__(self) -> str:
        part = f", slice {self.slice}," if self.slice else ""
        return f"{self.kind} of microbatch {self.microbatch}{part} at stage {self.stage}"

    @property
    def label(self) -> str:
        """A letter and the microbatch: F forward, B backward, I and W its parts for input and weight."""
        return f"{LETTERS.get(self.kind, '?')}{self.microbatch}{'.' + str(self.slice) if self.slice else ''}"

    @property
    def sends_gradient(self) -> bool:
        """Whether the stage before waits for it."""
        return self.kind in ("backward", "backward-input")

    @property
    def frees_activation(self) -> bool:
        """Whether nothing of this microbatch at this stage is needed after it."""
        return self.kind in ("backward", "backward-weight")

    def parts(self) -> tuple[Task, ...]:
        """A whole backward's two parts; any other task alone."""
        if self.kind != "backward":
            return (self,)
        return (self._replace(kind="backward-input"), self._replace(kind="backward-weight"))


class Located(NamedTuple):
    """A task and where it stands."""

    task: Task
    device: int
    place: int
    """In the device's order, from 0."""

    def __str__(self) -> str:
        return f"{self.task} (device {self.device}, place {self.place})"


@dataclass(frozen=True, kw_only=True)
class Table:
    """The tasks of one step, or of a run that is never flushed, per device in their order."""

    name: str
    orders: Sequence[Sequence[Task]]
    """Per device the tasks in the order in which it does them."""
    stages: int
    """Into which the model is cut; a device may have several, and a stage may be on several devices."""
    microbatches: int
    slices: int = 1
    """Into which the tokens of a microbatch are cut."""
    chunks: int = 1
    """Stages that are one device's part of the model: a stage takes 1/chunks of the times given for such a part."""
    microbatches_per_update: int = 0
    """After so many the weights change; all of them where it is not given: one update, after a flush."""

    def __post_init__(self) -> None:
        """Makes tuples of any sequences.

        Raises:
            ShardingError: a number below one, or a device without a task.
        """
        per_update = self.microbatches_per_update or self.microbatches
        object.__setattr__(self, "microbatches_per_update", per_update)
        object.__setattr__(self, "orders", tuple(tuple(Task(*task) for task in order) for order in self.orders))
        at_least_one(
            f"schedule {self.name!r}",
            devices=len(self.orders),
            stages=self.stages,
            microbatches=self.microbatches,
            slices=self.slices,
            chunks=self.chunks,
            microbatches_per_update=per_update,
        )
        if idle := [device for device, order in enumerate(self.orders) if not order]:
            must = "every device has one"
            raise ShardingError(f"schedule {self.name!r}", there=f"no task on device {idle[0]}", must=must)

    @property
    def devices(self) -> int:
        """How many."""
        return len(self.orders)

    @property
    def placement(self) -> tuple[tuple[int, ...], ...]:
        """Per device its stages, in the order of the model."""
        return tuple(tuple(sorted({task.stage for task in order})) for order in self.orders)

    @property
    def units(self) -> int:
        """Microbatches, or slices of them: what goes through a stage in one task."""
        return self.microbatches * self.slices

    def unit(self, task: Task) -> int:
        """The number of a task's microbatch, or of its slice, all slices of a microbatch side by side."""
        return task.microbatch * self.slices + task.slice

    @property
    def share(self) -> float:
        """What one task has of a whole microbatch through a device's part of the model."""
        return 1 / (self.chunks * self.slices)

    def located(self) -> Iterator[Located]:
        """All tasks, device by device."""
        for device, order in enumerate(self.orders):
            yield from (Located(task, device, place) for place, task in enumerate(order))


def at_least_one(asked: str, **numbers: int) -> None:
    """Returns None where all numbers are whole and at least 1; raises a ShardingError that names those that are not."""
    bad = {name: value for name, value in numbers.items() if not is_count(value) or value < 1}
    if bad:
        raise ShardingError(
            asked,
            there=[f"{name}={value!r}" for name, value in bad.items()],
            must="whole numbers of at least 1",
            fix=[f"{name}=1 or more" for name in bad],
        )


def whole_units(asked: str, microbatches: int, unit: int, *, must: str) -> None:
    """Returns None where the microbatches make whole units; raises a ShardingError with the next number that does."""
    if rest := microbatches % unit:
        raise ShardingError(
            f"{asked}(microbatches)",
            there=f"{microbatches} % {unit} = {rest}",
            must=must,
            fix=f"microbatches={microbatches + unit - rest}",
        )


def is_count(value: object) -> bool:
    """Whether it is a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)


def listed(places: Iterable[Located]) -> str:
    """Where tasks stand: "device 0, place 3 and device 1, place 5"."""
    return " and ".join(f"device {one.device}, place {one.place}" for one in places)
