"""Options of the train step: AdamW, gradient accumulation, ZeRO and sequence parallelism."""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import arg

from sharding.errors import ShardingError

from .option_checks import at_least, given_options
from .pipeline_config import PipelineConfig
from .sequence_config import SequenceConfig

ZeroStage = Literal[0, 1, 2, 3]
Offload = Literal["host"]


@dataclass(frozen=True, kw_only=True)
class Optimization:
    """AdamW with linear warm-up, cosine decay to a tenth, and clipping by the global norm."""

    lr: float = 4e-3
    """Peak learning rate."""
    warmup: int = 50
    """Warm-up steps."""
    weight_decay: float = 0.1
    """Weight decay of all matrices."""
    clip: float = 1.0
    """Maximum global gradient norm."""
    accumulate: int = 1
    """Gradient accumulation steps per batch."""
    pipeline: PipelineConfig | None = None
    """The pipeline, on a mesh with a pipe axis."""
    sequence: SequenceConfig | None = None
    """The sequence-parallel attention, on a mesh with a seq axis."""
    zero: ZeroStage = 0
    """ZeRO stage over the axis `data`: 0 none, 1 optimizer state, 2 and gradients, 3 and parameters."""
    offload: Offload | None = None
    """Where ZeRO keeps the optimizer state, if not on the devices."""
    delay_after: int | None = None
    """Steps before ZeRO-Offload's delayed update."""
    sequence_parallel: bool = False
    """Whether the residual stream is sharded over the axis `tensor` along its length."""

    def __post_init__(self) -> None:
        at_least("--lr", self.lr, 0)
        at_least("--warmup", self.warmup, 0)
        at_least("--weight-decay", self.weight_decay, 0)
        at_least("--accumulate", self.accumulate, 1)
        if self.delay_after is not None:
            at_least("--delay-after", self.delay_after, 0)
        if self.clip <= 0:
            raise ShardingError(f"--clip {self.clip}", required="a norm greater than 0", fix="--clip 1.0")


@dataclass(frozen=True, kw_only=True)
class OptimizationOptions:
    """Changes to the optimization of a model's recipe; None keeps the recipe's value."""

    lr: float | None = None
    """Peak learning rate. Default of this and of every option that is None: the model's recipe; 4e-3 for gpt-tiny."""
    warmup: int | None = None
    """Warm-up steps; 50 for gpt-tiny."""
    weight_decay: float | None = None
    """Weight decay of all matrices; 0.1 for gpt-tiny."""
    clip: float | None = None
    """Maximum global gradient norm; 1.0 for gpt-tiny."""
    accumulate: int | None = None
    """Gradient accumulation: compute each batch in this many microbatches to save memory; 1 for gpt-tiny."""
    zero: ZeroStage | None = None
    """ZeRO stage, what is sharded over the axis data: 1 optimizer state, 2 and gradients, 3 and parameters.
    Default: 0, nothing."""
    offload: Offload | None = None
    """Keep the optimizer state in the host's memory (ZeRO-Offload); needs --zero. Default: on the devices."""
    delay_after: Annotated[int | None, arg(metavar="STEPS")] = None
    """After so many steps, apply each gradient a step later (ZeRO-Offload's delayed update); needs --zero."""
    sequence_parallel: bool = False
    """Megatron sequence parallelism: shard activations between the branches of a block over the axis tensor."""

    def __post_init__(self) -> None:
        self.applied_to(Optimization())

    def applied_to(self, default: Optimization) -> Optimization:
        """`default` with the options that were given."""
        return dataclasses.replace(default, **given_options(self))


def check_zero(
    stage: ZeroStage, axes: dict[str, int], *, offload: Offload | None = None, delay_after: int | None = None
) -> None:
    """Raise an error if ZeRO has no axis to shard over, or if its options are given without it."""
    if not stage and (offload is not None or delay_after is not None):
        asked = f"--offload {offload}" if offload is not None else f"--delay-after {delay_after}"
        raise ShardingError(asked, found="--zero 0", required="a ZeRO stage", fix=f"--zero 1 {asked}")
    if stage and axes.get("data", 1) == 1:
        mesh = ",".join(f"{name}={size}" for name, size in axes.items())
        raise ShardingError(
            f"--zero {stage}",
            found=f"--mesh {mesh}",
            required="an axis data larger than 1; ZeRO shards over it",
            fix="--mesh data=2,...",
        )
