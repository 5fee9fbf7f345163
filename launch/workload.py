"""A workload: a model, its training and its data, as values and functions without a loop or files.

The training loop and `sharding explain` know a model only through this; `workloads` makes one for each.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from sharding.mesh import platform as mesh_platform

Batch = Any
"""A pytree of arrays [B, ...], on the host or the devices."""

Shapes = Any
"""A pytree of ShapeDtypeStructs."""

DeviceMetrics = dict[str, jax.Array]
"""Metrics of one step or batch, still on the devices."""

EvalOutput = Mapping[str, np.ndarray]
"""The result of `Workload.evaluate` for one batch, on the host."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that a step updates and a checkpoint saves."""

    params: nnx.State
    opt_state: Any
    step: jax.Array
    """Steps taken so far."""
    variables: nnx.State
    """State updated without a gradient, such as running averages of batch norms; mostly empty."""


LossAux = tuple[nnx.State, DeviceMetrics]
"""The auxiliary outputs of a loss: new variables, and metrics."""

ValueAndGrad = Callable[[nnx.State, nnx.State, Batch, jax.Array | None], tuple[tuple[jax.Array, LossAux], nnx.State]]
"""params, variables, batch, key -> loss with auxiliary outputs; gradients."""


class DataSource(Protocol):
    """The batches of a run. Equal seeds give equal batches on every mesh."""

    @property
    def name(self) -> str:
        """One word for the data, such as `corpus`."""
        ...

    @property
    def description(self) -> str:
        """A readable description of the data."""
        ...

    @property
    def sha256(self) -> str:
        """Checksum of the data; a run resumes only on the same data."""
        ...

    def train_batch(self, step: int, rows: np.ndarray | None = None) -> Batch:
        """The training batch of `step`, numpy arrays [B, ...], or these rows of it; a function of the seed and
        `step`."""
        ...

    def heldout_batches(self) -> Sequence[Batch]:
        """The batches of every evaluation, numpy arrays [B, ...]; always the same."""
        ...


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A metric: its name in the metrics file and its display format."""

    name: str
    unit: str
    """Printed after the number: `bits per byte`, `% right`."""
    scale: float = 1.0
    """Factor from the stored value to this unit."""
    digits: int = 3
    final_digits: int = 2
    """Digits at the end of a run."""

    def number(self, value: float, *, digits: int | None = None) -> str:
        """The value in this unit."""
        return f"{value * self.scale:.{self.digits if digits is None else digits}f}"

    def format(self, value: float, *, digits: int | None = None) -> str:
        """The value and its unit."""
        return f"{self.number(value, digits=digits)} {self.unit}"


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Text generation of a generative model."""

    generate: Callable[[nnx.State, jax.Array, jax.Array], jax.Array]
    """params, prompts [B, S], key -> prompts with their continuations, [B, S + generated]."""
    prompt: np.ndarray
    """One prompt [S]."""
    decode: Callable[[np.ndarray], str]
    """A generated row -> text."""


class LossOutput(NamedTuple):
    """A loss and metrics that come with it."""

    loss: jax.Array
    """The differentiated loss."""
    metrics: DeviceMetrics
    """For the metrics file; a `loss` among them is shown in place of the differentiated one."""


@dataclass(frozen=True, kw_only=True)
class MpmdStep:
    """A pipelined train step as separate programs: before the pipeline, its tasks (MPMD), and the update."""

    prepare: Callable[[TrainState, Batch], tuple[Any, Any, Any]]
    """state, batch -> the stages' parameters, inputs and targets."""
    gradient: Callable[[Any, Any, Any], tuple[jax.Array, Any]]
    """These -> the loss and its gradients; not traceable."""
    update: Callable[[TrainState, jax.Array, Any], tuple[TrainState, DeviceMetrics]]
    """state, loss, gradients -> the outputs of a train step."""
    requested: bool | None
    """Whether to run the step as MPMD; None decides by the mesh."""

    def suits(self, mesh: Mesh | AbstractMesh) -> bool:
        """Whether to run the step as MPMD: by default on a CPU, where the barriers of an SPMD tick are slow.

        Not where stages are sharded too: XLA:CPU of JAX 0.10.2 may hang with several programs that communicate.
        """
        if self.requested is not None:
            return self.requested
        on_cpu = mesh_platform(mesh) == "cpu"
        return on_cpu and jax.process_count() == 1 and mesh.size == mesh.shape["pipe"]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, its training and its data."""

    name: str
    config: Any
    """The model's configuration, a dataclass."""
    summary: str
    """A few words on the model besides its name and size."""
    init: Callable[[jax.Array], TrainState]
    """key -> the initial state."""
    train_step: Callable[[TrainState, Batch], tuple[TrainState, DeviceMetrics]]
    """state, batch -> the next state; `loss`, `gradient_norm`, `learning_rate`, and the model's own metrics."""
    evaluate: Callable[[nnx.State, nnx.State, Batch], DeviceMetrics]
    """params, variables, batch -> the inputs of `score` for this batch."""
    score: Callable[[Sequence[EvalOutput]], dict[str, float]]
    """The results of `evaluate` for all held-out batches -> the metrics of `heldout`."""
    batch_shapes: Callable[[int], Shapes]
    """Batch size -> an abstract batch."""
    source: Callable[[int, int], DataSource]
    """Batch size, seed -> the data; reads or generates them."""
    loss: Metric
    """Display of the training loss."""
    heldout: tuple[Metric, ...]
    """The held-out metrics; the first has the unit of `loss`."""
    item: str
    """The unit of throughput, in the plural: `tokens`."""
    items_per_example: int = 1
    sampler: Sampler | None = None
    mpmd_step: MpmdStep | None = None

    @property
    def throughput_name(self) -> str:
        """The name of the throughput in the metrics."""
        return f"{self.item}_per_second"

    @property
    def state_shapes(self) -> TrainState:
        """The abstract state."""
        return jax.eval_shape(lambda: self.init(jax.random.key(0)))

    def format_batch(self, batch_size: int) -> str:
        """The size of a batch: `16 x 128 tokens`, `64 images`."""
        each = f" x {self.items_per_example}" if self.items_per_example > 1 else ""
        return f"{batch_size}{each} {self.item}"

    def format_heldout(
        self, values: Mapping[str, float], digits: Callable[[Metric], int] = lambda metric: metric.digits
    ) -> str:
        """The held-out metrics with their units."""
        return "  ".join(metric.format(values[metric.name], digits=digits(metric)) for metric in self.heldout)
