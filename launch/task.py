"""What a run is about: a model, its training and its data, as values and functions that know no loop and no files.

The loop in `train` and the completion in `explain` know this much of a model and no more; `tasks` makes one for each.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

Batch = Any
"""A pytree of arrays [B, ...], on the host or the devices."""

Shapes = Any
"""A pytree of ShapeDtypeStructs."""

Measured = dict[str, jax.Array]
"""Figures of one step, or of one batch, still on the devices."""

Looked = Mapping[str, np.ndarray]
"""What `Task.evaluate` found in one batch, on the host."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """All that a step changes, and all that a checkpoint needs."""

    params: nnx.State
    opt_state: Any
    step: jax.Array
    """Steps taken so far."""
    variables: nnx.State
    """What a step changes without a gradient, such as the running averages of batch norms; mostly empty."""


Beside = tuple[nnx.State, Measured]
"""What a loss leaves beside its value: new variables, and figures."""

ValueAndGrad = Callable[[nnx.State, nnx.State, Batch, jax.Array | None], tuple[tuple[jax.Array, Beside], nnx.State]]
"""params, variables, batch, key -> loss, new variables and figures; gradients."""


class Source(Protocol):
    """Where the batches of a run come from. Equal seeds give equal batches, whatever the mesh."""

    @property
    def name(self) -> str:
        """One word for what it is, such as `corpus`."""
        ...

    @property
    def description(self) -> str:
        """What the data are, for people."""
        ...

    @property
    def sha256(self) -> str:
        """Identifies the data: a run is not resumed on others."""
        ...

    def train_batch(self, step: int, rows: np.ndarray | None = None) -> Batch:
        """The batch to train on at `step`, numpy arrays [B, ...], or these rows of it: depends on the seed and `step`
        alone."""
        ...

    def heldout_batches(self) -> Sequence[Batch]:
        """The batches to look at in every evaluation, numpy arrays [B, ...]: always the same ones."""
        ...


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure by its name in the metrics, and how people read it."""

    name: str
    unit: str
    """Follows the number: `bits per byte`, `% right`."""
    scale: float = 1.0
    """What one is in this unit."""
    digits: int = 3
    last_digits: int = 2
    """Digits at the end of a run."""

    def number(self, value: float, *, digits: int | None = None) -> str:
        """The value in this unit."""
        return f"{value * self.scale:.{self.digits if digits is None else digits}f}"

    def written(self, value: float, *, digits: int | None = None) -> str:
        """The value and its unit."""
        return f"{self.number(value, digits=digits)} {self.unit}"


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """How a model that generates shows what it has learnt."""

    generate: Callable[[nnx.State, jax.Array, jax.Array], jax.Array]
    """params, prompts [B, S], key -> the prompts and what follows, [B, S + more]."""
    prompt: np.ndarray
    """One prompt [S]."""
    text: Callable[[np.ndarray], str]
    """A generated row as text."""


class Lowered(NamedTuple):
    """A loss and what else is measured of it."""

    loss: jax.Array
    """What training lowers."""
    figures: Measured
    """For the metrics; a `loss` among them is shown in place of what is lowered."""


@dataclass(frozen=True, kw_only=True)
class Apart:
    """A pipelined train step whose tasks are programs of their own, started one by one between two others."""

    cut: Callable[[TrainState, Batch], tuple[Any, Any, Any]]
    """state, batch -> the stages' parameters, inputs and targets."""
    gradient: Callable[[Any, Any, Any], tuple[jax.Array, Any]]
    """These -> the loss and its gradients; called outside traces."""
    update: Callable[[TrainState, jax.Array, Any], tuple[TrainState, Measured]]
    """state, loss, gradients -> what a train step returns."""
    wanted: bool | None
    """Whether to run it so; None leaves it to the mesh."""

    def suits(self, mesh: Mesh) -> bool:
        """Whether to run it so: on a CPU, where a device that waits for another in each tick is slow.

        Not where stages are split too: XLA:CPU of JAX 0.10.2 may hang with several programs that communicate.
        """
        if self.wanted is not None:
            return self.wanted
        on_cpu = mesh.devices.flat[0].platform == "cpu"
        return on_cpu and jax.process_count() == 1 and mesh.size == mesh.shape["pipe"]


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model, its training and its data."""

    name: str
    config: Any
    """The model's configuration, a dataclass."""
    about: str
    """A few words on the model besides its name and size."""
    init: Callable[[jax.Array], TrainState]
    """key -> the state before the first step."""
    train_step: Callable[[TrainState, Batch], tuple[TrainState, Measured]]
    """state, batch -> the next state; `loss`, `gradient_norm`, `learning_rate`, and what the model has of its own."""
    evaluate: Callable[[nnx.State, nnx.State, Batch], Measured]
    """params, variables, batch -> what `score` needs of the batch."""
    score: Callable[[Sequence[Looked]], dict[str, float]]
    """What `evaluate` found in each held-out batch -> the figures of `heldout`."""
    batch_shapes: Callable[[int], Shapes]
    """Number of examples -> a batch as shapes and dtypes."""
    source: Callable[[int, int], Source]
    """Number of examples in a batch, seed -> the data; reads or makes them."""
    loss: Figure
    """How the training loss is shown."""
    heldout: tuple[Figure, ...]
    """The held-out figures; the first is in the unit in which the loss is shown."""
    item: str
    """What throughput counts, in the plural: `tokens`."""
    items_per_example: int = 1
    sampler: Sampler | None = None
    apart: Apart | None = None

    @property
    def rate(self) -> str:
        """The name of the throughput in the metrics."""
        return f"{self.item}_per_second"

    @property
    def state_shapes(self) -> TrainState:
        """The state as shapes and dtypes, without any array."""
        return jax.eval_shape(self.init, jax.random.key(0))

    def written_batch(self, batch_size: int) -> str:
        """A batch in words: `16 x 128 tokens`, `64 images`."""
        each = f" x {self.items_per_example}" if self.items_per_example > 1 else ""
        return f"{batch_size}{each} {self.item}"

    def written_heldout(
        self, figures: Mapping[str, float], digits: Callable[[Figure], int] = lambda figure: figure.digits
    ) -> str:
        """The held-out figures with their units."""
        return "  ".join(figure.written(figures[figure.name], digits=digits(figure)) for figure in self.heldout)
