"""What the command line says of a pipeline."""

from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import arg

from sharding.errors import ShardingError

from .options import at_least, given

Executor = Literal["spmd", "mpmd"]

Schedule = Literal[
    "1f1b", "gpipe", "eager-1f1b", "interleaved", "chimera", "zb-h1", "zb-h2", "zb-v", "dualpipe-v", "terapipe"
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Pipelining:
    """How a batch goes through the stages that a pipe axis makes of a model."""

    devices: int
    """Of the pipe axis."""
    schedule: str
    microbatches: int
    slices: int = 1
    """Of each sequence."""
    executor: Executor | None = None


@dataclass(frozen=True, kw_only=True)
class PipelineChoice:
    """What the command says of a pipeline, which a pipe axis of the mesh asks for."""

    schedule: Annotated[Schedule | None, arg(name="schedule")] = None
    """Order of the microbatches' tasks: 1f1b, gpipe, eager-1f1b, interleaved and zb-v and dualpipe-v (two stages for
    each device), chimera, zb-h1, zb-h2, terapipe (slices of a sequence follow each other too). Default: 1f1b."""
    microbatches: int | None = None
    """Parts of a batch that follow each other through the stages. Default: two for each device of the pipe axis."""
    slices: int | None = None
    """Parts of a sequence for terapipe. Default: one for each device of the pipe axis."""
    executor: Executor | None = None
    """spmd: one program for all devices; mpmd: a program for each task and device. Default: mpmd on CPUs that a pipe
    axis alone splits, else spmd."""

    def __post_init__(self) -> None:
        if self.microbatches is not None:
            at_least("--microbatches", self.microbatches, 1)
        if self.slices is not None:
            at_least("--slices", self.slices, 1)
            if self.schedule != "terapipe":
                said = f" --schedule {self.schedule}" if self.schedule else ""
                must = "a schedule that cuts sequences"
                raise ShardingError(f"--slices {self.slices}{said}", must=must, fix="--schedule terapipe")

    def over(self, axes: dict[str, int], accumulate: int = 1) -> Pipelining | None:
        """The pipeline on a mesh with these axes; None where it has no pipe axis. All sizes must be known."""
        devices = axes.get("pipe", 1)
        said = [f"--{name} {value}" for name, value in given(self).items()]
        if devices == 1:
            if said:
                must = "a pipeline is an axis of the mesh"
                raise ShardingError(" ".join(said), there="no pipe axis", must=must, fix="--mesh pipe=2,data=2")
            return None
        if accumulate > 1:
            raise ShardingError(
                f"--accumulate {accumulate} --mesh pipe={devices}",
                must="the parts of a batch are the pipeline's microbatches",
                fix=f"--microbatches {accumulate}",
            )
        return Pipelining(
            devices=devices,
            schedule=self.schedule or "1f1b",
            microbatches=self.microbatches or 2 * devices,
            slices=(self.slices or devices) if self.schedule == "terapipe" else 1,
            executor=self.executor,
        )
