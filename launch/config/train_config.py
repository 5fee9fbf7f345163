"""Options of `sharding train`.

Options check themselves when they are made, so mistakes are reported before any model is loaded.
"""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import OmitArgPrefixes, arg

from sharding.errors import ShardingError

from .byte_size import parse_bytes
from .mesh_config import check_batch, parse_mesh
from .model_config import ModelOptions
from .optimizer_config import Optimization, OptimizationOptions
from .option_checks import at_least, given_options
from .pipeline_config import PipelineOptions
from .sequence_config import SequenceOptions
from .text_config import TextOptions


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The default training settings of a model."""

    steps: int = 600
    batch: int = 16
    optimization: Optimization = field(default_factory=Optimization)
    eval_every: int = 100
    checkpoint_every: int = 200
    sample: int = 0


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a model and write metrics, checkpoints, loss curve and report to a folder.

    Options that are None default to the model's recipe; the help shows those of gpt-tiny.
    """

    model: OmitArgPrefixes[ModelOptions] = field(default_factory=ModelOptions)
    mesh: str = "data=2,tensor=2"
    """Axes and their sizes, major axis first: data, fsdp, tensor, expert, pipe and seq.
    One size may be -1: all remaining devices."""
    plan: Annotated[Path | None, arg(metavar="FILE")] = None
    """Train on the mesh, with the annotations and the recomputation of this plan, which `sharding plan --out` wrote for
    the same model and batch, instead of --mesh, --remat and the model's layout."""
    devices: int | None = None
    """Number of virtual CPU devices. Default: as many as the mesh needs. Not for GPUs and TPUs."""
    steps: int | None = None
    """Total training steps; 600 for gpt-tiny."""
    batch: int | None = None
    """Global batch size in examples (sequences, images, ...); 16 for gpt-tiny."""
    optimization: OmitArgPrefixes[OptimizationOptions] = field(default_factory=OptimizationOptions)
    pipeline: OmitArgPrefixes[PipelineOptions] = field(default_factory=PipelineOptions)
    sequence: OmitArgPrefixes[SequenceOptions] = field(default_factory=SequenceOptions)
    seed: int = 0
    """Seed of initialization, data order, dropout and sampling."""
    eval_every: int | None = None
    """Steps between evaluations on held-out data; 0 evaluates at the end only; 100 for gpt-tiny."""
    checkpoint_every: int | None = None
    """Steps between checkpoints; 0 saves at the end only; 200 for gpt-tiny."""
    sample: int | None = None
    """Tokens of text to generate at the end, for generative models; 256 for gpt-tiny."""
    text: OmitArgPrefixes[TextOptions] = field(default_factory=TextOptions)
    out: Path = Path("runs/latest")
    """Output folder for metrics, checkpoints, loss curve and report."""
    keep: int = 3
    """Number of newest checkpoints to keep."""
    keep_best: bool = True
    """Whether to also keep the checkpoint with the best held-out metric, among those saved at an evaluation step."""
    nonfinite: Literal["stop", "skip"] = "stop"
    """On a non-finite loss or gradient: stop, or skip the step and keep the state before it."""
    memory: Annotated[str | None, arg(metavar="BYTES")] = None
    """Memory per device, such as 16GB: what the model's layers keep, recompute or offload is chosen so that the
    compiled step is within it. Default: the preset's recomputation, or --remat."""
    init: Annotated[Path | None, arg(metavar="FILE")] = None
    """Initialize the parameters from this safetensors file, such as `sharding checkpoint export` writes."""
    resume: bool = False
    """Resume from the newest checkpoint in the output folder."""
    resume_step: int | None = None
    """Resume from the checkpoint of this step instead; newer ones are moved aside."""

    def __post_init__(self) -> None:
        counts = {"steps": 1, "batch": 1, "eval_every": 0, "checkpoint_every": 0, "sample": 0, "devices": 1, "keep": 1}
        for name, minimum in counts.items():
            if getattr(self, name) is not None:
                at_least("--" + name.replace("_", "-"), getattr(self, name), minimum)
        if self.resume_step is not None and not self.resume:
            raise ShardingError(f"--resume-step {self.resume_step}", required="--resume", fix="--resume")
        if self.memory is not None and self.plan is not None:
            raise ShardingError(
                f"--plan {self.plan} --memory {self.memory}",
                found="a plan, which says what the layers keep",
                required="one of them",
                fix=f"sharding plan --memory {self.memory}",
            )
        if self.memory is not None:
            parse_bytes("--memory", self.memory)
        axes = parse_mesh(self.mesh)
        if self.batch is not None and -1 not in axes.values():
            accumulate = self.optimization.accumulate or 1
            check_batch(self.batch, axes, accumulate, self.pipeline.resolve(axes, accumulate))

    def applied_to(self, default: Recipe) -> Recipe:
        """`default` with the options that were given."""
        options = {name: value for name, value in given_options(self).items() if name in Recipe.__dataclass_fields__}
        options["optimization"] = self.optimization.applied_to(default.optimization)
        return dataclasses.replace(default, **options)


def as_json(config: Any) -> dict[str, Any]:
    """The configuration as plain values, for a checkpoint or a report."""
    return {name: _plain(value) for name, value in dataclasses.asdict(config).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, frozenset):
        return sorted(map(_plain, value), key=str)
    return str(value) if isinstance(value, Path) else value
