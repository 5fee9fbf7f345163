"""What a run computes: pure functions from a train state and tokens, which know a model but no loop and no files."""

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from sharding.errors import ShardingError

from ..models import gpt, layouts
from .config import ModelChoice, Optimization

Measured = dict[str, jax.Array]
"""Figures of one step, still on the devices."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """All that a step changes, and all that a checkpoint needs."""

    params: nnx.State
    opt_state: Any
    step: jax.Array
    """Steps taken so far."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model and its training as functions to hand to `sharding.jit`."""

    model: gpt.Config
    init: Callable[[jax.Array], TrainState]
    """key -> the state before the first step."""
    train_step: Callable[[TrainState, jax.Array], tuple[TrainState, Measured]]
    """state, tokens [B, S + 1] -> the next state, figures."""
    evaluate: Callable[[nnx.State, jax.Array], jax.Array]
    """params, tokens [B, S + 1] -> mean nats a token."""
    generate: Callable[[nnx.State, jax.Array, jax.Array], jax.Array]
    """params, prompt [B, S], key -> the prompt and what follows."""

    @property
    def state_shapes(self) -> TrainState:
        """The state as shapes and dtypes, without any array."""
        return jax.eval_shape(self.init, jax.random.key(0))

    def batch_shapes(self, batch_size: int) -> jax.ShapeDtypeStruct:
        """A batch as shape and dtype."""
        return jax.ShapeDtypeStruct((batch_size, self.model.context + 1), jnp.int32)


def model_config(choice: ModelChoice) -> gpt.Config:
    """The configuration of the model that `choice` names, with its changes."""
    if choice.name not in gpt.PRESETS:
        near = difflib.get_close_matches(choice.name, gpt.PRESETS, n=3, cutoff=0.3)
        raise ShardingError(
            f"--model {choice.name}",
            there="no model of this name",
            must=f"known models are {', '.join(gpt.PRESETS)}",
            fix=[f"--model {name}" for name in near],
        )
    try:
        return replace(gpt.PRESETS[choice.name], **choice.changes())
    except ValueError as error:
        raise ShardingError(f"--model {choice.name} with {choice.changes()}", there=str(error)) from None


def build(model: gpt.Config, optimization: Optimization, *, steps: int, seed: int, sample: int = 0) -> Task:
    """The task of training `model` for `steps` steps; `generate` makes `sample` tokens."""
    graph, _ = nnx.split(nnx.eval_shape(lambda: gpt.GPT(model, rngs=nnx.Rngs(0))), nnx.Param)
    schedule = learning_rate(optimization, steps)
    transform = optimizer(optimization, schedule)

    def init(key: jax.Array) -> TrainState:
        params = nnx.state(gpt.GPT(model, rngs=nnx.Rngs(params=key)), nnx.Param)
        return TrainState(params, transform.init(params), jnp.zeros((), jnp.int32))

    def loss(params: nnx.State, tokens: jax.Array, key: jax.Array | None) -> jax.Array:
        return gpt.next_token_loss(nnx.merge(graph, annotate(params)), tokens, key)

    def train_step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, Measured]:
        key = jax.random.fold_in(jax.random.key(seed), state.step) if model.dropout else None
        nats, gradients = jax.value_and_grad(loss)(state.params, tokens, key)
        updates, opt_state = transform.update(gradients, state.opt_state, state.params)
        measured = {
            "loss": nats,
            "gradient_norm": optax.tree.norm(gradients),
            "learning_rate": jnp.asarray(schedule(state.step), jnp.float32),
        }
        params = optax.apply_updates(state.params, updates)
        return replace(state, params=params, opt_state=opt_state, step=state.step + 1), measured

    def evaluate(params: nnx.State, tokens: jax.Array) -> jax.Array:
        return loss(params, tokens, None)

    def generate(params: nnx.State, prompt: jax.Array, key: jax.Array) -> jax.Array:
        return gpt.generate(nnx.merge(graph, annotate(params)), prompt, steps=sample, key=key, temperature=0.8)

    return Task(model=model, init=init, train_step=train_step, evaluate=evaluate, generate=generate)


def annotate(params: nnx.State) -> nnx.State:
    """`params` with the specs of the model's layout for the mesh around."""
    return layouts.annotate(params, layouts.gpt(jax.sharding.get_abstract_mesh().axis_names))


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
    """AdamW on gradients clipped by their global norm; norm scales do not decay."""
    return optax.chain(
        optax.clip_by_global_norm(optimization.clip),
        optax.adamw(schedule, b2=0.95, weight_decay=optimization.weight_decay, mask=_decays),
    )


def _decays(params: nnx.State) -> nnx.State:
    # By name: a stacked norm has two dims too.
    return jax.tree.map_with_path(lambda path, _: not re.search(r"norm\d*\b", jax.tree_util.keystr(path)), params)
