"""The train step of every model: gradients, clipping and AdamW."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import sharding
from sharding import zero
from sharding.annotations.layout import Layout

from ..models import layouts
from . import optimizer as optimizers
from . import pipelined_step
from .batch_rows import microbatches
from .config.mesh_config import MESH_AXES
from .config.optimizer_config import Optimization
from .workload import Batch, DeviceMetrics, LossAux, LossOutput, MpmdStep, TrainState, ValueAndGrad

LossFn = Callable[[Any, Batch, jax.Array | None], jax.Array | LossOutput]
"""module, batch, key -> the mean loss in nats; may update the module's variables."""


class TrainFunctions(NamedTuple):
    """The functions that train a module, and one that rebuilds the module from its state."""

    init: Callable[[jax.Array], TrainState]
    train_step: Callable[[TrainState, Batch], tuple[TrainState, DeviceMetrics]]
    merge: Callable[..., Any]
    """params and variables -> the module, its parameters annotated for the mesh in context."""
    mpmd_step: MpmdStep | None = None
    """The train step as MPMD programs, with a pipeline."""


def train_functions(
    make: Callable[[nnx.Rngs], nnx.Module],
    loss: LossFn,
    *,
    layout: Callable[[Any], Layout],
    optimization: Optimization,
    steps: int,
    key: jax.Array | None = None,
    staged: pipelined_step.StagedLoss | None = None,
) -> TrainFunctions:
    """The functions that train the module of `make` for `steps` steps.

    Args:
        make: rngs -> the module.
        loss: the loss function.
        layout: axis names -> the parameters' layout.
        optimization: AdamW and how the step is parallelized.
        steps: when the learning rate reaches its minimum.
        key: folded with the step and passed to the loss; None passes None.
        staged: the loss in pipeline stages; None for a module that can't be partitioned into stages.

    Raises:
        ShardingError: the optimization has a pipeline that this module doesn't support.
    """
    shapes = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    graph, _, _ = nnx.split(shapes, nnx.Param, ...)
    pipe = optimization.pipeline and pipelined_step.model_pipeline(optimization.pipeline, staged, shapes, key)
    schedule = optimizers.learning_rate(optimization, steps)
    transform = optimizers.optimizer(optimization, schedule)

    def rules() -> Layout:
        names = jax.sharding.get_abstract_mesh().axis_names
        others = {*names} - {"pipe"}
        # A mesh of other axes is that of a plan, which has its own annotations.
        return layout(names) if not others or not others.isdisjoint(MESH_AXES) else sharding.layout({})

    def init(key: jax.Array) -> TrainState:
        _, params, variables = nnx.split(make(nnx.Rngs(params=key)), nnx.Param, ...)
        opt_state = optimizers.with_zero(transform, optimization, params, rules()).init(params)
        return TrainState(params, opt_state, jnp.zeros((), jnp.int32), variables)

    def merge(params: nnx.State, variables: nnx.State) -> Any:
        params = rules().annotate(params)
        if optimization.zero == 3:
            params = zero.split(params, like=optimizers.layout_specs(params, rules()))
        if pipe is not None:
            params = layouts.staged(params)
        # Both are recreated here: nnx only lets a variable change in the trace that created it.
        return nnx.merge(graph, params, jax.tree.map(lambda leaf: leaf, variables))

    def loss_with_aux(
        params: nnx.State, variables: nnx.State, batch: Batch, key: jax.Array | None
    ) -> tuple[jax.Array, LossAux]:
        module = merge(params, variables)
        output = loss(module, batch, key)
        output = output if isinstance(output, LossOutput) else LossOutput(output, {})
        return output.loss, (nnx.state(module, nnx.Not(nnx.Param)), output.metrics)

    def step_key(state: TrainState) -> jax.Array | None:
        return None if key is None else jax.random.fold_in(key, state.step)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, DeviceMetrics]:
        if pipe is None:
            value_and_grad = jax.value_and_grad(loss_with_aux, has_aux=True)
        else:
            value_and_grad = pipelined_step.value_and_grad(merge, pipe)
        if optimization.accumulate > 1:
            value_and_grad = accumulate_gradients(value_and_grad, optimization.accumulate)
        (nats, (variables, metrics)), gradients = value_and_grad(state.params, state.variables, batch, step_key(state))
        state, measured = apply_gradients(replace(state, variables=variables), nats, gradients)
        return state, measured | metrics

    def apply_gradients(state: TrainState, nats: jax.Array, gradients: nnx.State) -> tuple[TrainState, DeviceMetrics]:
        tx = optimizers.with_zero(transform, optimization, state.params, rules())
        norm = optax.tree.norm(gradients)
        if isinstance(tx, zero.Sharded):
            # State on the host passes the devices group by group, so what is not finite must not reach it.
            finite = jnp.isfinite(nats) & jnp.isfinite(norm) if optimization.offload else None
            params, opt_state = tx.apply(gradients, state.opt_state, state.params, only_if=finite)
        else:
            updates, opt_state = tx.update(gradients, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
        measured = {
            "loss": nats,
            "gradient_norm": norm,
            "learning_rate": jnp.asarray(schedule(state.step), jnp.float32),
        }
        return replace(state, params=params, opt_state=opt_state, step=state.step + 1), measured

    mpmd_step = None if pipe is None else pipelined_step.mpmd_step(shapes, merge, step_key, apply_gradients, pipe)
    return TrainFunctions(init, train_step, merge, mpmd_step)


def accumulate_gradients(value_and_grad: ValueAndGrad, parts: int) -> ValueAndGrad:
    """`value_and_grad` over `parts` microbatches in sequence: the mean of their losses and gradients.

    Equal to those of the full batch if the loss is a mean over examples of equal weight that don't depend on each
    other. Variables carry over from one microbatch to the next; each microbatch has its own key. Metrics are means too.
    """

    def accumulated(
        params: nnx.State, variables: nnx.State, batch: Batch, key: jax.Array | None
    ) -> tuple[tuple[jax.Array, LossAux], nnx.State]:
        def add(
            carry: tuple[nnx.State, jax.Array, nnx.State], part: tuple[Batch, jax.Array]
        ) -> tuple[tuple[nnx.State, jax.Array, nnx.State], DeviceMetrics]:
            variables, nats, gradients = carry
            rows, number = part
            part_key = None if key is None else jax.random.fold_in(key, number)
            (part_nats, (variables, metrics)), part_gradients = value_and_grad(params, variables, rows, part_key)
            gradients = jax.tree.map(lambda total, one: total + one / parts, gradients, part_gradients)
            return (variables, nats + part_nats / parts, gradients), metrics

        zeros = jax.tree.map(jnp.zeros_like, params)
        start = (variables, jnp.zeros((), jnp.float32), zeros)
        rows = jax.tree.map(lambda leaf: microbatches(leaf, parts), batch)
        (variables, nats, gradients), metrics = jax.lax.scan(add, start, (rows, jnp.arange(parts)))
        return (nats, (variables, jax.tree.map(lambda values: jnp.mean(values, axis=0), metrics))), gradients

    return accumulated
