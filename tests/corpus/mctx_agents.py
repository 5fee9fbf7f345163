"""mctx: a search of each board of a batch with Haiku's networks, and a train step on what the search found.

Shape suffixes: B boards, Y X squares, M features, A actions.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import mctx
import optax
from support.train_steps.step import Sizes, Step

from sharding import P

from . import MakeProgram
from .common import KEY, Rules, batch_specs, floats, ints, replicated, specs_by

PACKAGE = "mctx"
ACTIONS = 128


class Networks(hk.Module):
    """MuZero's three networks: of residual convolutions, or of dense layers for `blocks` 0."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__("networks")
        self.width, self.blocks = width, blocks

    def trunk(self, x: jax.Array, name: str) -> jax.Array:
        """Residual blocks with layer norms."""
        if not self.blocks:
            h = hk.nets.MLP([4 * self.width, self.width], name=name)(x)
            return hk.LayerNorm(-1, True, True, name=f"{name}_norm")(h)
        x = hk.Conv2D(self.width, 3, name=f"{name}_in")(x)
        for n in range(self.blocks):
            h = jax.nn.relu(hk.LayerNorm((-3, -2, -1), True, True, name=f"{name}_norm_{n}")(x))
            x = x + hk.Conv2D(self.width, 3, name=f"{name}_{n}")(h)
        return x

    def represent(self, observation: jax.Array) -> jax.Array:
        """The embedding of an observation."""
        return self.trunk(observation, "represent")

    def predict(self, embedding: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Logits of actions, and a value."""
        flat = jax.nn.relu(hk.Flatten()(embedding))
        return hk.Linear(ACTIONS, name="policy")(flat), hk.Linear(1, name="value")(flat)[:, 0]

    def step(self, embedding: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The next embedding, and a reward."""
        planes = jax.nn.one_hot(action, ACTIONS)
        if self.blocks:
            planes = jnp.broadcast_to(planes[:, None, None], (*embedding.shape[:-1], ACTIONS))
        new = self.trunk(jnp.concatenate([embedding, planes], -1), "step")
        return new, hk.Linear(1, name="reward")(hk.Flatten()(new))[:, 0]


def networks(width: int, blocks: int) -> Any:
    """The networks as functions of one set of parameters."""

    def make() -> Any:
        nets = Networks(width, blocks)

        def init(observation: jax.Array, action: jax.Array) -> Any:
            embedding, _ = nets.step(nets.represent(observation), action)
            return nets.predict(embedding)

        return init, (nets.represent, nets.predict, nets.step)

    return hk.without_apply_rng(hk.multi_transform(make))


def search(policy: Any, nets: Any, params: Any, key: jax.Array, observation: jax.Array) -> Any:
    """The policy's output for each observation."""
    represent, predict, step = nets.apply
    embedding = represent(params, observation)
    logits, value = predict(params, embedding)
    root = mctx.RootFnOutput(prior_logits=logits, value=value, embedding=embedding)

    def recurrent(params: Any, _: jax.Array, action: jax.Array, embedding: jax.Array) -> Any:
        embedding, reward = step(params, embedding, action)
        logits, value = predict(params, embedding)
        discount = jnp.full_like(reward, 0.997)
        output = mctx.RecurrentFnOutput(reward=reward, discount=discount, prior_logits=logits, value=value)
        return output, embedding

    return policy(params=params, rng_key=key, root=root, recurrent_fn=recurrent)


def acting(sizes: Sizes, *, policy: Any, width: int, blocks: int, observation: Any, weights: Any) -> Step:
    """An action for each observation, and the weights of all actions."""
    nets = networks(width, blocks)
    params = jax.eval_shape(nets.init, KEY, observation, ints(observation.shape[0]))

    def run(key: jax.Array, params: Any, observation: jax.Array) -> Any:
        key, now = jax.random.split(key)
        output = search(policy, nets, params, now, observation)
        return key, output.action, output.action_weights

    specs_of = None, weights(params, sizes), batch_specs(observation, sizes)
    return Step(run=run, args=(KEY, params, observation), specs=specs_of)


def reanalysing(sizes: Sizes, *, policy: Any, width: int, blocks: int, observation: Any, weights: Any) -> Step:
    """Searches anew, then trains the policy on the search's weights and the value on its value."""
    nets = networks(width, blocks)
    params = jax.eval_shape(nets.init, KEY, observation, ints(observation.shape[0]))
    optimizer = optax.adamw(1e-3)

    def loss(params: Any, observation: jax.Array, weights: jax.Array, value: jax.Array) -> jax.Array:
        represent, predict, _ = nets.apply
        logits, predicted = predict(params, represent(params, observation))
        return (optax.softmax_cross_entropy(logits, weights) + 0.25 * (predicted - value) ** 2).mean()

    def run(state: Any, key: jax.Array, observation: jax.Array) -> Any:
        params, optimizer_state = state
        output = search(policy, nets, params, key, observation)
        value = output.search_tree.summary().value
        error, gradient = jax.value_and_grad(loss)(params, observation, output.action_weights, value)
        updates, optimizer_state = optimizer.update(gradient, optimizer_state, params)
        return (optax.apply_updates(params, updates), optimizer_state), error

    state = params, jax.eval_shape(optimizer.init, params)
    specs_of = (weights(params, sizes), None), None, batch_specs(observation, sizes)
    return Step(run=run, args=(state, KEY, observation), specs=specs_of)


DENSE: Rules = (
    ("*/linear_0/w", P(None, "model")),
    ("*/linear_0/b", P("model")),
    ("*/linear_1/w", P("model", None)),
)


PROGRAMS: dict[str, MakeProgram] = {
    "muzero, residual": partial(
        acting,
        policy=partial(mctx.muzero_policy, num_simulations=32, max_depth=16),
        width=128,
        blocks=4,
        observation=floats(512, 8, 8, 32),
        weights=replicated,
    ),
    "gumbel muzero, reanalyse": partial(
        reanalysing,
        policy=partial(mctx.gumbel_muzero_policy, num_simulations=64, max_num_considered_actions=16),
        width=2048,
        blocks=0,
        observation=floats(1024, 512),
        weights=partial(specs_by, DENSE),
    ),
}
