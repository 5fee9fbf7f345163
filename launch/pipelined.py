"""The gradient of a batch whose microbatches go through the stages of a pipeline."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from sharding import ShardingError, pipeline
from sharding.pipeline import schedules

from .pipeline_config import Pipelining
from .rows import microbatches
from .task import Apart, Batch, Beside, Lowered, Measured, TrainState, ValueAndGrad

SCHEDULES: dict[str, Callable[..., pipeline.Schedule]] = {
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


@dataclass(frozen=True, kw_only=True)
class Tally:
    """What layers say of themselves beside their output, counted on the way through the stages."""

    start: Any
    """Of no layer yet, a pytree of float32 scalars."""
    add: Callable[[Any, Any], Any]
    """The count so far, what one layer says -> the count."""
    lowered: Callable[[jax.Array, Any], Lowered]
    """The mean loss and the count of all layers -> what training lowers, and the figures."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How a model's loss is computed where its layers are stages, see ``sharding.pipeline.split``.

    The parameters of its layers are stacked, so that an axis on the layers is one on the stages. What comes before the
    layers and each of them may be given a random key.
    """

    examples: Callable[[Batch], tuple[Any, Any]]
    """Of a batch what is read before the layers, and what the loss reads."""
    loss: Callable[[Any, Any], jax.Array]
    """What comes after the layers, targets -> the mean loss."""
    tally: Tally | None = None
    """For layers that return (output, what they say of themselves)."""
    past: Callable[[Any, int, int], Any] | None = None
    """module, sequences, tokens of each -> what a layer gets with the first slice of them; None where the layers need
    whole sequences."""
    remat: Any = None
    """Which values of a layer are kept for the backward; see ``sharding.pipeline.value_and_grad``."""


@dataclass(frozen=True, kw_only=True)
class Pipe:
    """A model's pipeline."""

    cut: Cut
    schedule: pipeline.Schedule
    layers: int
    executor: pipeline.Executor | None
    """None leaves it to the mesh."""

    @property
    def is_sliced(self) -> bool:
        """Whether sequences are cut."""
        return self.schedule.slices > 1

    def rows(self, batch: Batch, key: jax.Array | None) -> tuple[Any, Any]:
        """Inputs and targets, [microbatches, ...]; where sequences are cut, of each slice.

        Inputs have a key for each microbatch, as those of a batch have that is accumulated in as many parts.
        """
        number = self.schedule.microbatches
        rows = jax.tree.map(lambda leaf: microbatches(leaf, number), batch)
        inputs, targets = self.cut.examples(rows)
        if not self.is_sliced:
            keys = None if key is None else jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(number))
            return (inputs, keys), targets
        lengths = self._lengths(inputs.shape[-1])
        return pipeline.sliced(inputs, lengths), [part for part, _ in pipeline.sliced(targets, lengths)]

    def _lengths(self, tokens: int) -> tuple[int, ...]:
        slices = self.schedule.slices
        if tokens % slices:
            raise ShardingError(
                f"--slices {slices}",
                there=f"{tokens} tokens, {slices} slices",
                must="slices of one length",
                fix=[f"--slices {n}" for n in range(2, slices) if tokens % n == 0][-1:],
            )
        return (tokens // slices,) * slices


class _Riding(NamedTuple):
    """What goes from stage to stage."""

    x: Any
    keys: jax.Array | None
    """Of all layers."""
    layer: jax.Array | None
    """Whose turn it is."""
    count: Any


class _Stages:
    """A module, or its shapes, as stages for inputs like these."""

    def __init__(self, pipe: Pipe, module: Any, inputs: Any):
        self.pipe, self.tally = pipe, pipe.cut.tally
        first = inputs[0] if pipe.is_sliced else inputs
        one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), first)
        riding = {"first": self._first, "layer": self._layer, "last": lambda model, y: model.after_blocks(y.x)}
        self.split = pipeline.split(
            module, pipe.schedule.stages, inputs=one, sliced=pipe.is_sliced, **({} if pipe.is_sliced else riding)
        )
        self.context = None
        if pipe.is_sliced and pipe.cut.past is not None:
            tokens = sum(part.shape[-1] for part, _ in inputs)
            self.context = self.split.context(pipe.cut.past(module, inputs[0][0].shape[1], tokens))

    @property
    def params(self) -> dict[str, Any]:
        """In parts. Where figures are measured the last one has a zero for each, whose gradient is the figure."""
        params = self.split.params
        if self.tally is None:
            return params
        figures = jax.eval_shape(self.tally.lowered, jnp.zeros(()), self.tally.start).figures
        return params | {"last": (params.get("last"), dict.fromkeys(figures, jnp.zeros(())))}

    def merged(self, gradients: dict[str, Any]) -> tuple[nnx.State, Measured]:
        """The gradient of the module's parameters, and the figures."""
        figures = {}
        if self.tally is not None:
            last, figures = gradients["last"]
            gradients = gradients | {"last": last}
        there = {part: gradients[part] for part in self.split.params}
        return nnx.state(self.split.merge(there), nnx.Param), figures

    def value_and_grad(self, executor: pipeline.Executor) -> pipeline.ValueAndGrad:
        """Params, inputs, targets -> the loss and its gradients."""
        return pipeline.value_and_grad(
            self.split.stage_fn,
            self._loss,
            self.pipe.schedule,
            first_fn=self.split.first_fn,
            last_fn=self.split.last_fn if self.tally is None else self._counted,
            remat=self.pipe.cut.remat,
            context=self.context,
            executor=executor,
        )

    def _first(self, model: Any, inputs: Any) -> _Riding:
        """With the keys that the model itself would give its layers."""
        rows, key = inputs
        count = None if self.tally is None else self.tally.start
        if key is None:
            return _Riding(model.before_blocks(rows), None, None, count)
        before, behind = jax.random.split(key)
        keys = jax.random.split(behind, self.pipe.layers)
        return _Riding(model.before_blocks(rows, key=before), keys, jnp.zeros((), jnp.int32), count)

    def _layer(self, layer: Any, at: _Riding) -> _Riding:
        found = layer(at.x) if at.keys is None else layer(at.x, at.keys[at.layer])
        then = None if at.layer is None else at.layer + 1
        if self.tally is None:
            return _Riding(found, at.keys, then, None)
        x, said = found
        return _Riding(x, at.keys, then, self.tally.add(at.count, said))

    def _counted(self, own: Any, y: Any, shared: Any = None) -> Any:
        last, figures = own
        return self.split.last_fn(last, y, shared), y.count, figures

    def _loss(self, output: Any, target: Any) -> jax.Array:
        if self.tally is None:
            return self.pipe.cut.loss(output, target) / self.pipe.schedule.slices
        output, count, zeros = output
        found = self.tally.lowered(self.pipe.cut.loss(output, target), count)
        shown = {name: zeros[name] * jax.lax.stop_gradient(figure) for name, figure in found.figures.items()}
        return sum(shown.values(), found.loss)


def checked(pipelining: Pipelining, cut: Cut | None, module: Any, key: jax.Array | None) -> Pipe:
    """The pipeline that was asked for.

    Args:
        pipelining: what was asked for.
        cut: of the model; None where it can't be cut.
        module: the model, or its shapes.
        key: of what is random in it.

    Raises:
        ShardingError: no such pipeline for this model.
    """
    asked = f"--mesh pipe={pipelining.devices} --schedule {pipelining.schedule}"
    if cut is None:
        there = f"{type(module).__name__}, whose layers and ends are not told apart"
        raise ShardingError(asked, there=there, must="a model whose layers can be stages", fix="--model gpt-tiny")
    if pipelining.slices > 1 and cut.past is None:
        there = f"{type(module).__name__}, whose layers need whole sequences"
        raise ShardingError(asked, there=there, must="a causal model", fix="--model gpt-tiny")
    if pipelining.slices > 1 and key is not None:
        raise ShardingError(asked, there="dropout", must="slices of a sequence get no random key", fix="--dropout 0")
    slices = {"slices": pipelining.slices} if pipelining.schedule == "terapipe" else {}
    make = SCHEDULES[pipelining.schedule]
    schedule = make(stages=pipelining.devices, microbatches=pipelining.microbatches, **slices)
    layers = jax.tree.leaves(nnx.state(module.blocks))[0].shape[0]
    if layers % schedule.stages:
        raise ShardingError(
            asked,
            there=f"{layers} blocks, {schedule.stages} stages",
            must="every stage has as many blocks",
            fix=[f"--mesh pipe={n}" for n in range(2, pipelining.devices) if layers % n == 0][-1:],
        )
    return Pipe(cut=cut, schedule=schedule, layers=layers, executor=pipelining.executor)


def value_and_grad(merged: Callable[[nnx.State, nnx.State], Any], pipe: Pipe) -> ValueAndGrad:
    """The gradient of a batch's mean loss by a pipeline over the axis ``pipe``.

    Args:
        merged: params, variables -> the module.
        pipe: its pipeline.
    """

    def both(
        params: nnx.State, variables: nnx.State, batch: Batch, key: jax.Array | None
    ) -> tuple[tuple[jax.Array, Beside], nnx.State]:
        inputs, targets = pipe.rows(batch, key)
        stages = _Stages(pipe, merged(params, variables), inputs)
        loss, gradients = stages.value_and_grad("spmd")(stages.params, inputs, targets)
        gradients, figures = stages.merged(gradients)
        return (loss, (variables, figures)), gradients

    return both


def apart(
    shapes: Any,
    merged: Callable[[nnx.State, nnx.State], Any],
    key: Callable[[TrainState], jax.Array | None],
    updated: Callable[[TrainState, jax.Array, nnx.State], tuple[TrainState, Measured]],
    pipe: Pipe,
) -> Apart:
    """The train step as programs around the pipeline's.

    Args:
        shapes: of the module.
        merged: params, variables -> the module.
        key: of what is random in the step that a state is before.
        updated: state, loss, gradients -> the next state.
        pipe: its pipeline.
    """
    stages: list[_Stages] = []
    runs: list[pipeline.ValueAndGrad] = []

    def cut(state: TrainState, batch: Batch) -> tuple[Any, Any, Any]:
        inputs, targets = pipe.rows(batch, key(state))
        return _Stages(pipe, merged(state.params, state.variables), inputs).params, inputs, targets

    def gradient(params: Any, inputs: Any, targets: Any) -> tuple[jax.Array, Any]:
        if not runs:
            stages.append(_Stages(pipe, shapes, inputs))
            runs.append(stages[0].value_and_grad("mpmd"))
        return runs[0](params, inputs, targets)

    def update(state: TrainState, loss: jax.Array, gradients: Any) -> tuple[TrainState, Measured]:
        gradients, figures = stages[0].merged(gradients)
        state, measured = updated(state, loss, gradients)
        return state, measured | figures

    wanted = None if pipe.executor is None else pipe.executor == "mpmd"
    return Apart(cut=cut, gradient=gradient, update=update, wanted=wanted)
