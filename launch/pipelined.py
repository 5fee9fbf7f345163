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
from .task import Apart, Batch, Beside, Measured, TrainState, ValueAndGrad

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
    executor: pipeline.Executor | None
    """None leaves it to the mesh."""

    @property
    def is_sliced(self) -> bool:
        """Whether sequences are cut."""
        return self.schedule.slices > 1

    def rows(self, batch: Batch) -> tuple[Any, Any]:
        """Inputs and targets, [microbatches, ...]; where sequences are cut, of each slice."""
        rows = jax.tree.map(lambda leaf: microbatches(leaf, self.schedule.microbatches), batch)
        inputs, targets = self.cut.inputs(rows), self.cut.targets(rows)
        if not self.is_sliced:
            return inputs, targets
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

    def split(self, module: Any, inputs: Any) -> pipeline.Split:
        """A module, or its shapes, as stages."""
        first = inputs[0] if self.is_sliced else inputs
        one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), first)
        return pipeline.split(module, self.schedule.stages, inputs=one, sliced=self.is_sliced)

    def value_and_grad(
        self, module: Any, split: pipeline.Split, inputs: Any, executor: pipeline.Executor
    ) -> pipeline.ValueAndGrad:
        """That of a module's stages."""
        context = None
        if self.is_sliced and self.cut.past is not None:
            tokens = sum(part.shape[-1] for part, _ in inputs)
            context = split.context(self.cut.past(module, inputs[0][0].shape[1], tokens))
        return pipeline.value_and_grad(
            split.stage_fn,
            lambda output, target: self.cut.loss(output, target) / self.schedule.slices,
            self.schedule,
            first_fn=split.first_fn,
            last_fn=split.last_fn,
            remat=self.cut.remat,
            context=context,
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
    if pipelining.slices > 1 and cut.past is None:
        there = f"{type(module).__name__}, whose layers need whole sequences"
        raise ShardingError(asked, there=there, must="a causal model", fix="--model gpt-tiny")
    slices = {"slices": pipelining.slices} if pipelining.schedule == "terapipe" else {}
    make = SCHEDULES[pipelining.schedule]
    schedule = make(stages=pipelining.devices, microbatches=pipelining.microbatches, **slices)
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
    ) -> tuple[tuple[jax.Array, Beside], nnx.State]:
        inputs, targets = pipe.rows(batch)
        module = merged(params, variables)
        split = pipe.split(module, inputs)
        loss, gradients = pipe.value_and_grad(module, split, inputs, "spmd")(split.params, inputs, targets)
        return (loss, (variables, {})), nnx.state(split.merge(gradients), nnx.Param)

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
            runs.append(pipe.value_and_grad(shapes, splits[0], inputs, "mpmd"))
        return runs[0](params, inputs, targets)

    def update(state: TrainState, loss: jax.Array, gradients: Any) -> tuple[TrainState, Measured]:
        return updated(state, loss, nnx.state(splits[0].merge(gradients), nnx.Param))

    wanted = None if pipe.executor is None else pipe.executor == "mpmd"
    return Apart(cut=cut, gradient=gradient, update=update, wanted=wanted)
