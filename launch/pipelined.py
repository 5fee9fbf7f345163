"""The gradient of a batch whose microbatches go through the stages of a pipeline."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from flax import nnx

from sharding import ShardingError, pipeline
from sharding.pipeline import schedules

from .pipeline_config import Pipelining
from .rows import microbatches
from .task import Apart, Batch, Measured, TrainState, ValueAndGrad

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
}


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How a model's loss is computed where its layers are stages, see ``sharding.pipeline.split``.

    The parameters of its layers are stacked, so that an axis on the layers is one on the stages.
    """

    inputs: Callable[[Batch], Any]
    """What comes before the layers reads this of a batch, ..."""
    targets: Callable[[Batch], Any]
    """... and the loss this."""
    loss: Callable[[Any, Any], jax.Array]
    """What comes after the layers, targets -> the mean loss."""
    remat: Any = None
    """Which values of a layer are kept for the backward; see ``sharding.pipeline.value_and_grad``."""


@dataclass(frozen=True, kw_only=True)
class Pipe:
    """A model's pipeline."""

    cut: Cut
    schedule: pipeline.Schedule
    executor: pipeline.Executor | None
    """None leaves it to the mesh."""

    def rows(self, batch: Batch) -> tuple[Any, Any]:
        """Inputs and targets, [microbatches, ...]."""
        rows = jax.tree.map(lambda leaf: microbatches(leaf, self.schedule.microbatches), batch)
        return self.cut.inputs(rows), self.cut.targets(rows)

    def split(self, module: Any, inputs: Any) -> pipeline.Split:
        """A module, or its shapes, as stages."""
        one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), inputs)
        return pipeline.split(module, self.schedule.stages, inputs=one)

    def value_and_grad(self, split: pipeline.Split, executor: pipeline.Executor) -> pipeline.ValueAndGrad:
        """That of the stages."""
        return pipeline.value_and_grad(
            split.stage_fn,
            self.cut.loss,
            self.schedule,
            first_fn=split.first_fn,
            last_fn=split.last_fn,
            remat=self.cut.remat,
            executor=executor,
        )


def checked(pipelining: Pipelining, cut: Cut | None, module: Any, key: jax.Array | None) -> Pipe:
    """The pipeline that was asked for.

    Args:
        pipelining: what was asked for.
        cut: of the model; None where it can't be cut.
        module: the model, or its shapes.
        key: of dropout.

    Raises:
        ShardingError: no such pipeline for this model.
    """
    asked = f"--mesh pipe={pipelining.devices} --schedule {pipelining.schedule}"
    if cut is None:
        there = f"{type(module).__name__}, whose layers and ends are not told apart"
        raise ShardingError(asked, there=there, must="a model whose layers can be stages", fix="--model gpt-tiny")
    if key is not None:
        raise ShardingError(asked, there="dropout", must="a pipeline's stages get no random key", fix="--dropout 0")
    make = SCHEDULES[pipelining.schedule]
    schedule = make(stages=pipelining.devices, microbatches=pipelining.microbatches)
    layers = jax.tree.leaves(nnx.state(module.blocks))[0].shape[0]
    if layers % schedule.stages:
        raise ShardingError(
            asked,
            there=f"{layers} layers, {schedule.stages} stages",
            must="every stage has as many layers",
            fix=[f"--mesh pipe={n}" for n in range(2, pipelining.devices) if layers % n == 0][-1:],
        )
    return Pipe(cut=cut, schedule=schedule, executor=pipelining.executor)


def value_and_grad(merged: Callable[[nnx.State, nnx.State], Any], pipe: Pipe) -> ValueAndGrad:
    """The gradient of a batch's mean loss by a pipeline over the axis ``pipe``.

    Args:
        merged: params, variables -> the module.
        pipe: its pipeline.
    """

    def both(
        params: nnx.State, variables: nnx.State, batch: Batch, key: jax.Array | None
    ) -> tuple[tuple[jax.Array, nnx.State], nnx.State]:
        inputs, targets = pipe.rows(batch)
        split = pipe.split(merged(params, variables), inputs)
        loss, gradients = pipe.value_and_grad(split, "spmd")(split.params, inputs, targets)
        return (loss, variables), nnx.state(split.merge(gradients), nnx.Param)

    return both


def apart(
    shapes: Any,
    merged: Callable[[nnx.State, nnx.State], Any],
    updated: Callable[[TrainState, jax.Array, nnx.State], tuple[TrainState, Measured]],
    pipe: Pipe,
) -> Apart:
    """The train step as programs around the pipeline's.

    Args:
        shapes: of the module.
        merged: params, variables -> the module.
        updated: state, loss, gradients -> the next state.
        pipe: its pipeline.
    """
    splits: list[pipeline.Split] = []
    runs: list[pipeline.ValueAndGrad] = []

    def cut(params: nnx.State, variables: nnx.State, batch: Batch) -> tuple[Any, Any, Any]:
        inputs, targets = pipe.rows(batch)
        return pipe.split(merged(params, variables), inputs).params, inputs, targets

    def gradient(params: Any, inputs: Any, targets: Any) -> tuple[jax.Array, Any]:
        if not runs:
            splits.append(pipe.split(shapes, inputs))
            runs.append(pipe.value_and_grad(splits[0], "mpmd"))
        return runs[0](params, inputs, targets)

    def update(state: TrainState, loss: jax.Array, gradients: Any) -> tuple[TrainState, Measured]:
        return updated(state, loss, nnx.state(splits[0].merge(gradients), nnx.Param))

    wanted = None if pipe.executor is None else pipe.executor == "mpmd"
    return Apart(cut=cut, gradient=gradient, update=update, wanted=wanted)
