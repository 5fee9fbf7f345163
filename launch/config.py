"""What the command line asks for: one frozen dataclass per command, each made of the parts that it is about.

The parts check themselves when they are made, without JAX: a wrong word is answered before anything heavy is loaded.
"""

import dataclasses
import difflib
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import OmitArgPrefixes, arg

from sharding.errors import ShardingError

from .options import at_least, given
from .pipeline_config import PipelineChoice, Pipelining
from .sequence_config import SequenceChoice, Sequencing

MESH_AXES = ("data", "fsdp", "tensor", "expert", "pipe", "seq")
"""The axes that the layouts in `models` know, that of a pipeline's stages and that of sequences."""

BATCH_AXES = ("data", "fsdp", "expert")
"""The axes that split a batch."""

LEAST_VOCAB = 257
"""Of byte pairs: the bytes and the end of a document."""

Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """A model by name, and what is to be different about it."""

    name: Annotated[str, arg(name="model")] = "gpt-tiny"
    """A preset: {gpt,gpt-moe,bert,resnet,vit,dlrm}-tiny train in minutes; gpt-small, gpt-xl, gpt-7b, gpt3-175b,
    gpt-moe-{2b,140b,1t}, bert-base, bert-large, resnet-18, resnet-50, vit-b16, vit-h14, dlrm-large."""
    dtype: Dtype | None = None
    """Type of activations; parameters stay float32. Default: the preset's."""
    dropout: float | None = None
    """Share of activations dropped in training. Default: the preset's."""
    kv_heads: int | None = None
    """Key and value heads, shared by the query heads. Default: the preset's."""
    remat: bool = False
    """Compute blocks again in the backward pass instead of keeping their activations."""
    scan: bool = False
    """Stack the layers and scan over them, which compiles one block for any depth."""

    def changes(self) -> dict[str, Any]:
        """The fields of the model's configuration that differ from the preset."""
        changes = {name: value for name, value in given(self).items() if name in ("dtype", "dropout", "kv_heads")}
        return changes | {name: True for name in ("remat", "scan") if getattr(self, name)}


@dataclass(frozen=True, kw_only=True)
class TextChoice:
    """Text to train on instead of the model's own data, for models that predict the next token."""

    files: Annotated[tuple[Path, ...], arg(name="data", metavar="FILE")] = ()
    """Files of UTF-8 text, or folders of them. Default: the model's own, such as Python's standard library."""
    tokenizer: Literal["bytes", "bpe"] | None = None
    """A byte a token, or byte pairs, which are learnt from the text at first use. Default: bpe for --data."""
    vocab: int | None = None
    """Most tokens that byte pairs may have. Default: 4096."""
    cache: Path | None = None
    """Folder where tokens are kept between runs. Default: sharding in the user's cache folder."""

    def __post_init__(self) -> None:
        if self.vocab is not None:
            at_least("--vocab", self.vocab, LEAST_VOCAB)
            if self.tokenizer == "bytes":
                raise ShardingError(
                    f"--vocab {self.vocab} --tokenizer bytes",
                    there="a byte a token: 256 tokens",
                    must="a vocabulary is learnt for byte pairs",
                    fix=["--tokenizer bpe", "leave --vocab out"],
                )

    @property
    def given(self) -> bool:
        """Whether the text, or how it becomes tokens, is not what the model has of its own."""
        return bool(self.files or self.tokenizer or self.vocab)


Zero = Literal[0, 1, 2, 3]


@dataclass(frozen=True, kw_only=True)
class Optimization:
    """AdamW with a linear warm-up, a cosine down to a tenth, and clipping by the global norm."""

    lr: float = 4e-3
    """Highest learning rate."""
    warmup: int = 50
    """Steps until it is reached."""
    weight_decay: float = 0.1
    """Decay of all matrices."""
    clip: float = 1.0
    """Largest norm of a gradient."""
    accumulate: int = 1
    """Parts of a batch whose gradients are computed one after the other."""
    pipeline: Pipelining | None = None
    """How these parts go through stages instead, if the mesh has any."""
    sequence: Sequencing | None = None
    """How positions attend to each other, if the mesh splits sequences."""
    zero: Zero = 0
    """What the axis `data` splits: 0 no states, 1 the optimizer's, 2 gradients too, 3 parameters too."""
    sequence_parallel: bool = False
    """Whether the axis `tensor` splits the residual stream's length too."""

    def __post_init__(self) -> None:
        at_least("--lr", self.lr, 0)
        at_least("--warmup", self.warmup, 0)
        at_least("--weight-decay", self.weight_decay, 0)
        at_least("--accumulate", self.accumulate, 1)
        if self.clip <= 0:
            raise ShardingError(f"--clip {self.clip}", must="the norm must be more than 0", fix="--clip 1.0")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a model is trained where the command does not say otherwise."""

    steps: int = 600
    batch: int = 16
    optimization: Optimization = field(default_factory=Optimization)
    eval_every: int = 100
    checkpoint_every: int = 200
    sample: int = 0


@dataclass(frozen=True, kw_only=True)
class OptimizationChoice:
    """What the command says of the optimization; None leaves it to the model's recipe."""

    lr: float | None = None
    """Highest learning rate. Default: the model's, as of all options that are None; 4e-3 for gpt-tiny."""
    warmup: int | None = None
    """Steps until it is reached; 50 for gpt-tiny."""
    weight_decay: float | None = None
    """Decay of all matrices; 0.1 for gpt-tiny."""
    clip: float | None = None
    """Largest norm of a gradient; 1.0 for gpt-tiny."""
    accumulate: int | None = None
    """Compute the gradient of a batch in so many parts one after the other, which needs less memory; 1 for gpt-tiny."""
    zero: Zero | None = None
    """ZeRO's stage, what the axis data splits: 1 the optimizer's state, 2 gradients too, 3 parameters too. Default: 0,
    none of them."""
    sequence_parallel: bool = False
    """Between the branches of a block, split the length of sequences over the axis tensor."""

    def __post_init__(self) -> None:
        self.over(Optimization())

    def over(self, default: Optimization) -> Optimization:
        """`default` with what was said instead."""
        return dataclasses.replace(default, **given(self))


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a model and write all that is worth keeping to a folder.

    What is None is left to the model's recipe; the figures in the help are those of gpt-tiny.
    """

    model: OmitArgPrefixes[ModelChoice] = field(default_factory=ModelChoice)
    mesh: str = "data=2,tensor=2"
    """Axes and their sizes, major axis first: data, fsdp, tensor, expert, pipe and seq. One size may be -1: what is
    left."""
    devices: int | None = None
    """How many virtual CPU devices to start. Default: as many as the mesh needs. Not for GPUs and TPUs."""
    steps: int | None = None
    """Steps of training in all; 600 for gpt-tiny."""
    batch: int | None = None
    """Examples in a step, over all devices: sequences, images, ...; 16 for gpt-tiny."""
    optimization: OmitArgPrefixes[OptimizationChoice] = field(default_factory=OptimizationChoice)
    pipeline: OmitArgPrefixes[PipelineChoice] = field(default_factory=PipelineChoice)
    sequence: OmitArgPrefixes[SequenceChoice] = field(default_factory=SequenceChoice)
    seed: int = 0
    """Of the initial values, the batches, dropout and the sample."""
    eval_every: int | None = None
    """Steps between two looks at what is held out; 0 looks at the end alone; 100 for gpt-tiny."""
    checkpoint_every: int | None = None
    """Steps between two checkpoints; 0 saves at the end alone; 200 for gpt-tiny."""
    sample: int | None = None
    """Tokens of text to generate at the end, by models that can; 256 for gpt-tiny."""
    text: OmitArgPrefixes[TextChoice] = field(default_factory=TextChoice)
    out: Path = Path("runs/latest")
    """Folder for metrics, checkpoints, curve and report."""
    keep: int = 3
    """How many of the newest checkpoints stay."""
    keep_best: bool = True
    """Whether the checkpoint of the best held-out figure stays too, of those saved at a step with such a figure."""
    nonfinite: Literal["stop", "skip"] = "stop"
    """After a step whose loss or gradient is not finite: stop, or go on from the state before it."""
    init: Annotated[Path | None, arg(metavar="FILE")] = None
    """Begin with the parameters of this safetensors file, such as `sharding checkpoint export` writes."""
    resume: bool = False
    """Go on from the newest checkpoint in the folder."""
    resume_step: int | None = None
    """Go on from the checkpoint of this step instead; newer ones are set aside."""

    def __post_init__(self) -> None:
        least = {"steps": 1, "batch": 1, "eval_every": 0, "checkpoint_every": 0, "sample": 0, "devices": 1, "keep": 1}
        for name, number in least.items():
            if getattr(self, name) is not None:
                at_least("--" + name.replace("_", "-"), getattr(self, name), number)
        if self.resume_step is not None and not self.resume:
            raise ShardingError(f"--resume-step {self.resume_step}", must="needs --resume", fix="--resume")
        axes = parse_mesh(self.mesh)
        if self.batch is not None and -1 not in axes.values():
            accumulate = self.optimization.accumulate or 1
            check_batch(self.batch, axes, accumulate, self.pipeline.over(axes, accumulate))

    def over(self, default: Recipe) -> Recipe:
        """`default` with what the command says instead."""
        said = {name: value for name, value in given(self).items() if name in Recipe.__dataclass_fields__}
        return dataclasses.replace(default, **(said | {"optimization": self.optimization.over(default.optimization)}))


@dataclass(frozen=True, kw_only=True)
class Explain:
    """Show how a model's train step would be split over a mesh, and why, without running it."""

    model: OmitArgPrefixes[ModelChoice] = field(default_factory=ModelChoice)
    mesh: str = "data=2,tensor=2"
    """Axes and their sizes, major axis first: data, fsdp, tensor, expert, pipe and seq. One size may be -1: what is
    left."""
    devices: str | None = None
    """Described devices, such as v5p:4x8x8 or h100:16x8; none of them is needed. Default: devices of no kind."""
    batch: int | None = None
    """Examples in a step, over all devices. Default: at least 16, as many as the mesh can split evenly."""
    pipeline: OmitArgPrefixes[PipelineChoice] = field(default_factory=PipelineChoice)
    sequence: OmitArgPrefixes[SequenceChoice] = field(default_factory=SequenceChoice)
    zero: Zero = 0
    """ZeRO's stage, what the axis data splits: 1 the optimizer's state, 2 gradients too, 3 parameters too."""
    sequence_parallel: bool = False
    """Between the branches of a block, split the length of sequences over the axis tensor."""
    why: Annotated[str | None, arg(metavar="NAME")] = None
    """Show where each axis of this tensor comes from, such as state/params/embed/table."""
    communication: bool = False
    """List the collectives of a step, with the line that causes each and why."""
    memory: bool = False
    """Show what fills a device at the peak of a step."""
    aot: Annotated[str | None, arg(metavar="DEVICES")] = None
    """Compile the step for devices that aren't there, such as v5p:8x8x8 or h100:64x8, with the compiler of their kind
    (extras tpu and cuda13), and show what was predicted beside what it made."""
    report: Annotated[Path | None, arg(metavar="FILE")] = None
    """Write a page that shows all of this, one HTML file, to be opened in a browser."""
    lock: Annotated[Path | None, arg(metavar="FILE")] = None
    """Write specs, collectives and peak to this file."""
    check: Annotated[Path | None, arg(metavar="FILE")] = None
    """Fail where the step differs from what this file says."""

    def __post_init__(self) -> None:
        axes = parse_mesh(self.mesh)
        if self.batch is not None:
            at_least("--batch", self.batch, 1)
            if -1 not in axes.values():
                check_batch(self.batch, axes, pipeline=self.pipeline.over(axes))
        check_zero(self.zero, axes)
        if self.aot is not None and self.devices not in (None, self.aot):
            raise ShardingError(
                f"--devices {self.devices} --aot {self.aot}",
                must="a step is shown for the devices that it is compiled for",
                fix=f"--aot {self.aot}",
            )


@dataclass(frozen=True, kw_only=True)
class Calibrate:
    """Measure what the devices of this machine can do, and write the numbers to a table that estimates read."""

    mesh: str = "data=-1"
    """Axes and their sizes, major axis first: data, fsdp and tensor; collectives are measured along each of them. One
    size may be -1: what is left. Default: all devices along one axis."""
    devices: int | None = None
    """How many virtual CPU devices to start. Default: as many as the mesh needs. Not for GPUs and TPUs."""
    like: Annotated[str | None, arg(metavar="CHIP")] = None
    """The chip that the devices are to be taken for, such as h100, where they don't say; it lends what is not measured.
    """
    quick: bool = False
    """Take seconds only, for figures that are off by a factor."""
    out: Annotated[Path, arg(metavar="FILE")] = Path("machine.json")
    """The table to write."""

    def __post_init__(self) -> None:
        parse_mesh(self.mesh)
        if self.devices is not None:
            at_least("--devices", self.devices, 1)
        if self.out.suffix != ".json":
            raise ShardingError(f"--out {self.out}", must="a table is a .json file", fix=f"--out {self.out}.json")


def parse_mesh(text: str) -> dict[str, int]:
    """Axis sizes by name, in order, from a text such as `data=2,tensor=4`."""
    axes: dict[str, int] = {}
    wrong = []
    for part in text.split(","):
        name, equals, number = (piece.strip() for piece in part.partition("="))
        problem = _axis_problem(name, equals, number, axes)
        if problem:
            wrong.append(problem)
        else:
            axes[name] = int(number)
    if sum(size == -1 for size in axes.values()) > 1:
        wrong.append("more than one size is -1")
    if wrong:
        raise ShardingError(
            f"--mesh {text}",
            there=wrong,
            must=f"a mesh is written name=size,name=size with names among {', '.join(MESH_AXES)}, each once",
            fix="--mesh data=2,fsdp=2,tensor=2",
        )
    return axes


def _axis_problem(name: str, equals: str, number: str, axes: dict[str, int]) -> str:
    if not (name and equals and number.lstrip("-").isdigit()):
        return f"{name + equals + number!r} is not name=size"
    if name not in MESH_AXES:
        near = difflib.get_close_matches(name, MESH_AXES, n=1, cutoff=0.4)
        return f"no layout knows the axis {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")
    if name in axes:
        return f"{name!r} is there twice"
    if int(number) < 1 and int(number) != -1:
        return f"the size of {name!r} is {number}, not at least 1"
    return ""


def batch_parts(axes: dict[str, int]) -> int:
    """Into how many parts a mesh with these axes splits a batch. All sizes must be known."""
    return math.prod(axes.get(axis, 1) for axis in BATCH_AXES)


def check_batch(batch: int, axes: dict[str, int], accumulate: int = 1, pipeline: Pipelining | None = None) -> None:
    """Raise an error if each of the parts in which `batch` examples are computed cannot be split evenly by `axes`.

    An axis of size -1 is left for later.
    """
    if -1 in axes.values():
        return
    times = {"accumulate": accumulate, "microbatches": 1 if pipeline is None else pipeline.microbatches}
    times = {name: number for name, number in times.items() if number > 1}
    parts = batch_parts(axes) * math.prod(times.values())
    if batch % parts == 0:
        return
    factors = [f"{axis}={axes[axis]}" for axis in BATCH_AXES if axis in axes]
    names = " * ".join([*factors, *(f"{name}={number}" for name, number in times.items())])
    lower, upper = batch // parts * parts, (batch // parts + 1) * parts
    near = lower if lower and batch - lower < upper - batch else upper
    raise ShardingError(
        " ".join([f"--batch {batch}", *(f"--{name} {number}" for name, number in times.items())]),
        there=f"{names} = {parts} parts; {batch} / {parts} = {batch / parts:g}",
        must="each part of the mesh must get the same number of examples" + (" each time" if times else ""),
        fix=f"--batch {near}",
    )


def check_zero(zero: Zero, axes: dict[str, int]) -> None:
    """Raise an error if no axis splits the model's states."""
    if zero and axes.get("data", 1) == 1:
        mesh = ",".join(f"{name}={size}" for name, size in axes.items())
        raise ShardingError(
            f"--zero {zero}",
            there=f"--mesh {mesh}",
            must="the axis data, over which the batch is split, splits the states",
            fix="--mesh data=2,...",
        )


def as_json(config: Any) -> dict[str, Any]:
    """The configuration as plain values, for a checkpoint or a report."""
    return {name: _plain(value) for name, value in dataclasses.asdict(config).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value
