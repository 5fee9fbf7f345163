"""Options of `sharding explain`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tyro.conf import OmitArgPrefixes, arg

from sharding.errors import ShardingError

from .byte_size import parse_bytes
from .mesh_config import check_batch, parse_mesh
from .model_config import ModelOptions
from .optimizer_config import Offload, ZeroStage, check_zero
from .option_checks import at_least
from .pipeline_config import PipelineOptions
from .sequence_config import SequenceOptions


@dataclass(frozen=True, kw_only=True)
class Explain:
    """Show how a model's train step is sharded over a mesh, and why, without running it."""

    model: OmitArgPrefixes[ModelOptions] = field(default_factory=ModelOptions)
    mesh: str = "data=2,tensor=2"
    """Axes and their sizes, major axis first: data, fsdp, tensor, expert, pipe and seq.
    One size may be -1: all remaining devices."""
    devices: str | None = None
    """Described devices, such as v5p:4x8x8 or h100:16x8; they need not be attached. Default: generic devices."""
    batch: int | None = None
    """Global batch size. Default: the smallest of at least 16 examples that the mesh divides."""
    pipeline: OmitArgPrefixes[PipelineOptions] = field(default_factory=PipelineOptions)
    sequence: OmitArgPrefixes[SequenceOptions] = field(default_factory=SequenceOptions)
    zero: ZeroStage = 0
    """ZeRO stage, what is sharded over the axis data: 1 optimizer state, 2 and gradients, 3 and parameters."""
    offload: Offload | None = None
    """Keep the optimizer state in the host's memory (ZeRO-Offload); needs --zero. Default: on the devices."""
    sequence_parallel: bool = False
    """Megatron sequence parallelism: shard activations between the branches of a block over the axis tensor."""
    why: Annotated[str | None, arg(metavar="NAME")] = None
    """Show where each axis of this tensor's sharding comes from, e.g. state/params/embed/table."""
    communication: bool = False
    """List the collectives of a step, each with the source line and the reason."""
    memory: bool = False
    """Show peak memory by category."""
    job: bool = False
    """Show the memory of every phase of a run: initialization, training step, evaluation, saving and restoring
    checkpoints, sampling; per device, and per process on the host. Says what fits the devices and --memory-budget."""
    memory_budget: Annotated[str | None, arg(metavar="BYTES")] = None
    """Show what the model's layers would have to recompute or offload to fit in this memory per device, such as 16GB,
    by line, or the least memory that would do; other options show the step that does."""
    suggest: bool = False
    """List the single annotations that would save most, with what a step then sends, holds and takes."""
    aot: Annotated[str | None, arg(metavar="DEVICES")] = None
    """Compile ahead of time for hardware you don't have, such as v5p:8x8x8 (extra tpu) or h100:64x8 (extra cuda13).
    Compares predictions with the compiled program."""
    report: Annotated[Path | None, arg(metavar="FILE")] = None
    """Write all of this as a self-contained HTML page."""
    lock: Annotated[Path | None, arg(metavar="FILE")] = None
    """Write specs, collectives and peak memory to a lock file."""
    check: Annotated[Path | None, arg(metavar="FILE")] = None
    """Fail if the step differs from this lock file."""

    def __post_init__(self) -> None:
        axes = parse_mesh(self.mesh)
        if self.memory_budget is not None:
            parse_bytes("--memory-budget", self.memory_budget)
        if self.batch is not None:
            at_least("--batch", self.batch, 1)
            if -1 not in axes.values():
                check_batch(self.batch, axes, pipeline=self.pipeline.resolve(axes))
        check_zero(self.zero, axes, offload=self.offload)
        if self.aot is not None and self.devices not in (None, self.aot):
            raise ShardingError(
                f"--devices {self.devices} --aot {self.aot}",
                required="the same devices for --devices and --aot",
                fix=f"--aot {self.aot}",
            )
