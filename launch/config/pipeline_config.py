"""Options of pipeline parallelism: schedule, microbatches and executor."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal, Self

from tyro.conf import arg

from sharding.errors import ShardingError
from sharding.pipeline import Executor, Schedule, schedules
from sharding.planner import Stages

from .option_checks import at_least, given_options

SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "1f1b": schedules.one_f_one_b,
    "gpipe": schedules.gpipe,
    "eager-1f1b": schedules.eager_1f1b,
    "interleaved": partial(schedules.interleaved, chunks=2),
    "chimera": schedules.chimera,
    "zb-h1": schedules.zb_h1,
    "zb-h2": schedules.zb_h2,
    "zb-v": schedules.zb_v,
    "dualpipe-v": schedules.dualpipe_v,
    "terapipe": schedules.terapipe,
}
"""The values of `--schedule`."""

if TYPE_CHECKING:
    ScheduleName = str
else:
    ScheduleName = Literal[tuple(SCHEDULES)]


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """A pipeline on a mesh of known size."""

    devices: int
    """Size of the pipe axis."""
    schedule: str
    microbatches: int
    slices: int = 1
    """Slices per sequence."""
    executor: Executor | None = None

    @classmethod
    def of(cls, stages: Stages) -> Self:
        """The pipeline of a plan: one program, whose annotations are the plan's."""
        return cls(devices=stages.count, schedule=stages.schedule, microbatches=stages.microbatches, executor="spmd")


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """Options of the pipeline that a pipe axis of the mesh makes."""

    schedule: Annotated[ScheduleName | None, arg(name="schedule")] = None
    """Pipeline schedule; interleaved, zb-v and dualpipe-v place two stages on each device.
    terapipe also pipelines slices of each sequence. Default: 1f1b."""
    microbatches: int | None = None
    """Microbatches per step. Default: 2 per device of the pipe axis."""
    slices: int | None = None
    """Slices per sequence for terapipe. Default: 1 per device of the pipe axis."""
    executor: Executor | None = None
    """spmd: one program for all devices; mpmd: a program per task and device.
    Default: mpmd on CPUs with a pipe axis alone, else spmd."""

    def __post_init__(self) -> None:
        if self.microbatches is not None:
            at_least("--microbatches", self.microbatches, 1)
        if self.slices is not None:
            at_least("--slices", self.slices, 1)
            if self.schedule != "terapipe":
                schedule = f" --schedule {self.schedule}" if self.schedule else ""
                raise ShardingError(
                    f"--slices {self.slices}{schedule}",
                    required="a schedule that slices sequences",
                    fix="--schedule terapipe",
                )

    def resolve(self, axes: dict[str, int], accumulate: int = 1) -> PipelineConfig | None:
        """The pipeline on a mesh with these axes; None without a pipe axis. All sizes must be known."""
        devices = axes.get("pipe", 1)
        options = [f"--{name} {value}" for name, value in given_options(self).items()]
        if devices == 1:
            if options:
                raise ShardingError(
                    " ".join(options),
                    found="no pipe axis",
                    required="a mesh with a pipe axis",
                    fix="--mesh pipe=2,data=2",
                )
            return None
        if accumulate > 1:
            raise ShardingError(
                f"--accumulate {accumulate} --mesh pipe={devices}",
                required="--accumulate 1 with a pipeline, whose microbatches accumulate gradients",
                fix=f"--microbatches {accumulate}",
            )
        return PipelineConfig(
            devices=devices,
            schedule=self.schedule or "1f1b",
            microbatches=self.microbatches or 2 * devices,
            slices=(self.slices or devices) if self.schedule == "terapipe" else 1,
            executor=self.executor,
        )
