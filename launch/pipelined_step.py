"""Gradients of a model whose layers are the stages of a pipeline."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from sharding import ShardingError, pipeline

from .batch_rows import microbatches
from .config.pipeline_config import SCHEDULES, PipelineConfig
from .workload import Batch, DeviceMetrics, LossAux, LossOutput, MpmdStep, TrainState, ValueAndGrad


@dataclass(frozen=True, kw_only=True)
class LayerStats:
    """Statistics that layers return beside their output, reduced on the way through the stages."""

    initial: Any
    """The reduction's initial value, a pytree of float32 scalars."""
    add: Callable[[Any, Any], Any]
    """The value so far, one layer's statistics -> the new value."""
    loss_output: Callable[[jax.Array, Any], LossOutput]
    """The mean loss and the value over all layers -> the differentiated loss, and metrics."""


@dataclass(frozen=True, kw_only=True)
class StagedLoss:
    """A model's loss when its layers are pipeline stages, see ``sharding.pipeline.split``.

    The layers' parameters are stacked, so that sharding the layer dim assigns layers to stages. A random key may be
    passed to each layer and to what precedes the layers.
    """

    examples: Callable[[Batch], tuple[Any, Any]]
    """A batch -> inputs of the first stage, targets of the loss."""
    loss: Callable[[Any, Any], jax.Array]
    """The model's output, targets -> the mean loss."""
    layer_stats: LayerStats | None = None
    """For layers that return (output, statistics)."""
    past: Callable[[Any, int, int], Any] | None = None
    """module, sequences, tokens per sequence -> the context of a layer at the first slice; None if layers need full
    sequences."""
    remat: Any = None
    """Which values of a layer are saved for the backward pass; see ``sharding.pipeline.value_and_grad``."""


@dataclass(frozen=True, kw_only=True)
class ModelPipeline:
    """The pipeline of one model."""

    staged: StagedLoss
    schedule: pipeline.Schedule
    layers: int
    executor: pipeline.Executor | None
    """None decides by the mesh."""

    @property
    def is_sliced(self) -> bool:
        """Whether sequences are sliced."""
        return self.schedule.slices > 1

    def examples(self, batch: Batch, key: jax.Array | None) -> tuple[Any, Any]:
        """Inputs and targets, [microbatches, ...]; a list over slices where sequences are sliced.

        Inputs have a key per microbatch: the key of the same microbatch under gradient accumulation.
        """
        number = self.schedule.microbatches
        rows = jax.tree.map(lambda leaf: microbatches(leaf, number), batch)
        inputs, targets = self.staged.examples(rows)
        if not self.is_sliced:
            keys = None if key is None else jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(number))
            return (inputs, keys), targets
        lengths = self._slice_lengths(inputs.shape[-1])
        return pipeline.sliced(inputs, lengths), [part for part, _ in pipeline.sliced(targets, lengths)]

    def _slice_lengths(self, tokens: int) -> tuple[int, ...]:
        slices = self.schedule.slices
        if tokens % slices:
            raise ShardingError(
                f"--slices {slices}",
                found=f"{tokens} tokens, {slices} slices",
                required="slices of equal length",
                fix=[f"--slices {n}" for n in range(2, slices) if tokens % n == 0][-1:],
            )
        return (tokens // slices,) * slices


class _Activation(NamedTuple):
    """What one stage passes to the next."""

    x: Any
    keys: jax.Array | None
    """Keys of all layers."""
    layer: jax.Array | None
    """Index of the next layer."""
    stats: Any


class _Stages:
    """A module, or its shapes, partitioned into stages for inputs like these."""

    def __init__(self, pipe: ModelPipeline, module: Any, inputs: Any):
        self.pipe, self.layer_stats = pipe, pipe.staged.layer_stats
        first = inputs[0] if pipe.is_sliced else inputs
        microbatch = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), first)
        functions = {"first": self._first, "layer": self._layer, "last": lambda model, y: model.after_blocks(y.x)}
        self.split = pipeline.split(
            module,
            pipe.schedule.stages,
            inputs=microbatch,
            sliced=pipe.is_sliced,
            **({} if pipe.is_sliced else functions),
        )
        self.context = None
        if pipe.is_sliced and pipe.staged.past is not None:
            tokens = sum(part.shape[-1] for part, _ in inputs)
            self.context = self.split.context(pipe.staged.past(module, inputs[0][0].shape[1], tokens))

    @property
    def params(self) -> dict[str, Any]:
        """The parameters by part. With layer statistics, `last` has a zero per metric, whose gradient is the metric."""
        params = self.split.params
        if self.layer_stats is None:
            return params
        metrics = jax.eval_shape(self.layer_stats.loss_output, jnp.zeros(()), self.layer_stats.initial).metrics
        return params | {"last": (params.get("last"), dict.fromkeys(metrics, jnp.zeros(())))}

    def merge(self, gradients: dict[str, Any]) -> tuple[nnx.State, DeviceMetrics]:
        """The gradients of the module's parameters, and the metrics."""
        metrics = {}
        if self.layer_stats is not None:
            last, metrics = gradients["last"]
            gradients = gradients | {"last": last}
        parts = {part: gradients[part] for part in self.split.params}
        return nnx.state(self.split.merge(parts), nnx.Param), metrics

    def value_and_grad(self, executor: pipeline.Executor) -> pipeline.ValueAndGrad:
        """Params, inputs, targets -> the loss and its gradients."""
        return pipeline.value_and_grad(
            self.split.stage_fn,
            self._loss,
            self.pipe.schedule,
            first_fn=self.split.first_fn,
            last_fn=self.split.last_fn if self.layer_stats is None else self._last_with_stats,
            remat=self.pipe.staged.remat,
            context=self.context,
            executor=executor,
        )

    def _first(self, model: Any, inputs: Any) -> _Activation:
        """The first activation, with the keys that the model itself would pass to its layers."""
        rows, key = inputs
        stats = None if self.layer_stats is None else self.layer_stats.initial
        if key is None:
            return _Activation(model.before_blocks(rows), None, None, stats)
        first_key, layers_key = jax.random.split(key)
        keys = jax.random.split(layers_key, self.pipe.layers)
        return _Activation(model.before_blocks(rows, key=first_key), keys, jnp.zeros((), jnp.int32), stats)

    def _layer(self, layer: Any, at: _Activation) -> _Activation:
        output = layer(at.x) if at.keys is None else layer(at.x, at.keys[at.layer])
        next_layer = None if at.layer is None else at.layer + 1
        if self.layer_stats is None:
            return _Activation(output, at.keys, next_layer, None)
        x, stats = output
        return _Activation(x, at.keys, next_layer, self.layer_stats.add(at.stats, stats))

    def _last_with_stats(self, params: Any, y: Any, shared: Any = None) -> Any:
        last, metrics = params
        return self.split.last_fn(last, y, shared), y.stats, metrics

    def _loss(self, output: Any, target: Any) -> jax.Array:
        if self.layer_stats is None:
            return self.pipe.staged.loss(output, target) / self.pipe.schedule.slices
        output, stats, zeros = output
        found = self.layer_stats.loss_output(self.pipe.staged.loss(output, target), stats)
        carried = {name: zeros[name] * jax.lax.stop_gradient(value) for name, value in found.metrics.items()}
        return sum(carried.values(), found.loss)


def model_pipeline(
    config: PipelineConfig, staged: StagedLoss | None, module: Any, key: jax.Array | None
) -> ModelPipeline:
    """The pipeline of `config` for a model.

    Args:
        config: the pipeline's options.
        staged: the model's loss in stages; None if it can't be partitioned into stages.
        module: the model, or its shapes.
        key: the model's random key; None if it uses none.

    Raises:
        ShardingError: this model doesn't support the pipeline.
    """
    asked = f"--mesh pipe={config.devices} --schedule {config.schedule}"
    if staged is None:
        raise ShardingError(
            asked,
            found=f"{type(module).__name__}, which has no pipeline stages",
            required="a model whose layers can be stages",
            fix="--model gpt-tiny",
        )
    if config.slices > 1 and staged.past is None:
        raise ShardingError(
            asked,
            found=f"{type(module).__name__}, whose layers need full sequences",
            required="a causal model",
            fix="--model gpt-tiny",
        )
    if config.slices > 1 and key is not None:
        raise ShardingError(
            asked, found="dropout", required="no dropout: slices of a sequence get no random key", fix="--dropout 0"
        )
    slices = {"slices": config.slices} if config.schedule == "terapipe" else {}
    make = SCHEDULES[config.schedule]
    schedule = make(stages=config.devices, microbatches=config.microbatches, **slices)
    layers = jax.tree.leaves(nnx.state(module.blocks))[0].shape[0]
    if layers % schedule.stages:
        raise ShardingError(
            asked,
            found=f"{layers} blocks, {schedule.stages} stages",
            required="equally many blocks per stage",
            fix=[f"--mesh pipe={n}" for n in range(2, config.devices) if layers % n == 0][-1:],
        )
    return ModelPipeline(staged=staged, schedule=schedule, layers=layers, executor=config.executor)


def value_and_grad(merge: Callable[[nnx.State, nnx.State], Any], pipe: ModelPipeline) -> ValueAndGrad:
    """The gradient of a batch's mean loss by a pipeline over the axis ``pipe``, as one SPMD program.

    Args:
        merge: params, variables -> the module.
        pipe: its pipeline.
    """

    def pipelined(
        params: nnx.State, variables: nnx.State, batch: Batch, key: jax.Array | None
    ) -> tuple[tuple[jax.Array, LossAux], nnx.State]:
        inputs, targets = pipe.examples(batch, key)
        stages = _Stages(pipe, merge(params, variables), inputs)
        loss, gradients = stages.value_and_grad("spmd")(stages.params, inputs, targets)
        gradients, metrics = stages.merge(gradients)
        return (loss, (variables, metrics)), gradients

    return pipelined


def mpmd_step(
    shapes: Any,
    merge: Callable[[nnx.State, nnx.State], Any],
    step_key: Callable[[TrainState], jax.Array | None],
    apply_gradients: Callable[[TrainState, jax.Array, nnx.State], tuple[TrainState, DeviceMetrics]],
    pipe: ModelPipeline,
) -> MpmdStep:
    """The train step as separate programs before, in and after the pipeline.

    Args:
        shapes: the abstract module.
        merge: params, variables -> the module.
        step_key: state -> the random key of its next step.
        apply_gradients: state, loss, gradients -> the next state.
        pipe: the module's pipeline.
    """
    stages: list[_Stages] = []
    runs: list[pipeline.ValueAndGrad] = []

    def prepare(state: TrainState, batch: Batch) -> tuple[Any, Any, Any]:
        inputs, targets = pipe.examples(batch, step_key(state))
        return _Stages(pipe, merge(state.params, state.variables), inputs).params, inputs, targets

    def gradient(params: Any, inputs: Any, targets: Any) -> tuple[jax.Array, Any]:
        if not runs:
            stages.append(_Stages(pipe, shapes, inputs))
            runs.append(stages[0].value_and_grad("mpmd"))
        return runs[0](params, inputs, targets)

    def update(state: TrainState, loss: jax.Array, gradients: Any) -> tuple[TrainState, DeviceMetrics]:
        gradients, metrics = stages[0].merge(gradients)
        state, measured = apply_gradients(state, loss, gradients)
        return state, measured | metrics

    requested = None if pipe.executor is None else pipe.executor == "mpmd"
    return MpmdStep(prepare=prepare, gradient=gradient, update=update, requested=requested)
