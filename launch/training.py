"""The train step of every model: the gradient of its loss, clipped, through AdamW."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from sharding import P, zero

from ..models import layouts
from . import pipelined
from .config import Optimization
from .rows import microbatches
from .task import Apart, Batch, Beside, Lowered, Measured, TrainState, ValueAndGrad

Loss = Callable[[Any, Batch, jax.Array | None], jax.Array | Lowered]
"""module, batch, key -> the mean loss in nats; the module may change its variables."""


class Trained(NamedTuple):
    """A module's training, and how to have the module back from its state."""

    init: Callable[[jax.Array], TrainState]
    train_step: Callable[[TrainState, Batch], tuple[TrainState, Measured]]
    merged: Callable[..., Any]
    """params and variables -> the module, its parameters annotated for the mesh around."""
    apart: Apart | None = None
    """A pipelined train step in programs of its own."""


def trained(
    make: Callable[[nnx.Rngs], nnx.Module],
    loss: Loss,
    *,
    layout: Callable[[Any], layouts.Layout],
    optimization: Optimization,
    steps: int,
    key: jax.Array | None = None,
    cut: pipelined.Cut | None = None,
) -> Trained:
    """The training of the module that `make` makes, for `steps` steps.

    Args:
        make: rngs -> the module.
        loss: what to lower.
        layout: axis names -> how the parameters are split.
        optimization: of AdamW.
        steps: until the learning rate is at its lowest.
        key: the loss gets this one folded with the step; None gives it none.
        cut: how a pipeline computes the loss; None for a module that can't be cut into stages.

    Raises:
        ShardingError: the optimization has a pipeline that the module can't go through.
    """
    shapes = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    graph, _, _ = nnx.split(shapes, nnx.Param, ...)
    pipe = optimization.pipeline and pipelined.checked(optimization.pipeline, cut, shapes, key)
    schedule = learning_rate(optimization, steps)
    transform = optimizer(optimization, schedule)

    def rules() -> layouts.Layout:
        return layout(jax.sharding.get_abstract_mesh().axis_names)

    def init(key: jax.Array) -> TrainState:
        _, params, variables = nnx.split(make(nnx.Rngs(params=key)), nnx.Param, ...)
        opt_state = _split(transform, optimization, params, rules()).init(params)
        return TrainState(params, opt_state, jnp.zeros((), jnp.int32), variables)

    def merged(params: nnx.State, variables: nnx.State) -> Any:
        params = layouts.annotate(params, rules())
        if optimization.zero == 3:
            params = zero.split(params, like=_known(params, rules()))
        if pipe is not None:
            params = layouts.staged(params)
        # Both are made anew here: nnx lets a variable change only in the trace that made it.
        return nnx.merge(graph, params, jax.tree.map(lambda leaf: leaf, variables))

    def value(params: nnx.State, variables: nnx.State, batch: Batch, key: jax.Array | None) -> tuple[jax.Array, Beside]:
        module = merged(params, variables)
        found = loss(module, batch, key)
        found = found if isinstance(found, Lowered) else Lowered(found, {})
        return found.loss, (nnx.state(module, nnx.Not(nnx.Param)), found.figures)

    def now(state: TrainState) -> jax.Array | None:
        return None if key is None else jax.random.fold_in(key, state.step)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Measured]:
        both = jax.value_and_grad(value, has_aux=True) if pipe is None else pipelined.value_and_grad(merged, pipe)
        if optimization.accumulate > 1:
            both = accumulated(both, optimization.accumulate)
        (nats, (variables, figures)), gradients = both(state.params, state.variables, batch, now(state))
        state, measured = updated(replace(state, variables=variables), nats, gradients)
        return state, measured | figures

    def updated(state: TrainState, nats: jax.Array, gradients: nnx.State) -> tuple[TrainState, Measured]:
        tx = _split(transform, optimization, state.params, rules())
        if isinstance(tx, zero.Sharded):
            params, opt_state = tx.apply(gradients, state.opt_state, state.params)
        else:
            updates, opt_state = tx.update(gradients, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
        measured = {
            "loss": nats,
            "gradient_norm": optax.tree.norm(gradients),
            "learning_rate": jnp.asarray(schedule(state.step), jnp.float32),
        }
        return replace(state, params=params, opt_state=opt_state, step=state.step + 1), measured

    apart = None if pipe is None else pipelined.apart(shapes, merged, now, updated, pipe)
    return Trained(init, train_step, merged, apart)


def accumulated(both: ValueAndGrad, parts: int) -> ValueAndGrad:
    """`both` over `parts` microbatches one after the other: the mean of their losses and of their gradients.

    These are the whole batch's for a loss that is a mean over examples of equal weight which do not see each other.
    Variables pass from one microbatch to the next; each has a key of its own. Figures are means too.
    """

    def over_parts(
        params: nnx.State, variables: nnx.State, batch: Batch, key: jax.Array | None
    ) -> tuple[tuple[jax.Array, Beside], nnx.State]:
        def add(
            carry: tuple[nnx.State, jax.Array, nnx.State], part: tuple[Batch, jax.Array]
        ) -> tuple[tuple[nnx.State, jax.Array, nnx.State], Measured]:
            variables, nats, gradients = carry
            rows, number = part
            now = None if key is None else jax.random.fold_in(key, number)
            (more, (variables, figures)), each = both(params, variables, rows, now)
            gradients = jax.tree.map(lambda total, one: total + one / parts, gradients, each)
            return (variables, nats + more / parts, gradients), figures

        zeros = jax.tree.map(jnp.zeros_like, params)
        start = (variables, jnp.zeros((), jnp.float32), zeros)
        rows = jax.tree.map(lambda leaf: microbatches(leaf, parts), batch)
        (variables, nats, gradients), figures = jax.lax.scan(add, start, (rows, jnp.arange(parts)))
        return (nats, (variables, jax.tree.map(lambda each: jnp.mean(each, axis=0), figures))), gradients

    return over_parts


def learning_rate(optimization: Optimization, steps: int) -> optax.Schedule:
    """The learning rate of every step: up in a line, then down along a cosine to a tenth."""
    warmup = min(optimization.warmup, steps // 2)
    return optax.warmup_cosine_decay_schedule(
        init_value=optimization.lr / (warmup + 1),
        peak_value=optimization.lr,
        warmup_steps=warmup,
        decay_steps=steps,
        end_value=optimization.lr / 10,
    )


def optimizer(optimization: Optimization, schedule: optax.Schedule) -> optax.GradientTransformation:
    """AdamW on gradients clipped by their global norm; norms and biases do not decay."""
    return optax.chain(
        optax.clip_by_global_norm(optimization.clip),
        optax.adamw(schedule, b2=0.95, weight_decay=optimization.weight_decay, mask=_decays),
    )


def _split(
    transform: optax.GradientTransformation, optimization: Optimization, params: Any, rules: layouts.Layout
) -> optax.GradientTransformation:
    """The optimizer over the axis `data`, where there is a mesh that it splits states over."""
    if not optimization.zero or "data" not in jax.sharding.get_abstract_mesh().axis_names:
        return transform
    return zero.shard(transform, stage=optimization.zero, like=_known(params, rules))


def _known(params: Any, rules: layouts.Layout) -> Any:
    """How a layout splits the parameters."""
    found = layouts.specs(params, rules)
    return jax.tree.map(lambda _, spec: P() if spec is None else spec, params, found, is_leaf=lambda x: x is None)


def _decays(params: nnx.State) -> nnx.State:
    # By name: a stacked norm has two dims too.
    kept = re.compile(r"norm\d*\b|\bbias")
    return jax.tree.map_with_path(lambda path, _: not kept.search(jax.tree_util.keystr(path)), params)
