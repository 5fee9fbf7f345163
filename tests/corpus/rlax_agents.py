"""RLax: its losses over Haiku's networks for images, as distributed agents train them.

Shape suffixes: B batch, T time, A actions.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import optax
import rlax
from support.train_steps.step import Sizes, Step

from sharding import P

from . import MakeProgram
from .common import KEY, Rules, batch_specs, floats, ints, replicated, specs, training

PACKAGE = "rlax"
ACTIONS, FRAME = 18, (84, 84, 4)


def torso(frames: jax.Array, width: int) -> jax.Array:
    """Residual convolutions, of frames as bytes."""
    h = frames.astype(jnp.float32) / 255
    for channels, blocks in ((64, 2), (128, 2), (128, 2)):
        h = hk.MaxPool(3, 2, "SAME")(hk.Conv2D(channels, 3)(h))
        for _ in range(blocks):
            h = h + hk.Conv2D(channels, 3)(jax.nn.relu(hk.Conv2D(channels, 3)(jax.nn.relu(h))))
    return jax.nn.relu(hk.Linear(width)(hk.Flatten()(jax.nn.relu(h))))


def frames(*batch: int) -> jax.ShapeDtypeStruct:
    """The shape of frames."""
    return floats(*batch, *FRAME, dtype=jnp.uint8)


def actor_critic(sizes: Sizes) -> Step:
    """IMPALA's update: an LSTM over unrolls and V-trace."""

    def forward(frames_BT: jax.Array) -> Any:
        core = hk.ResetCore(hk.LSTM(1024))
        h = hk.BatchApply(partial(torso, width=1024))(frames_BT)
        starts = jnp.zeros(h.shape[:2], bool)
        h, _ = hk.dynamic_unroll(core, (h, starts), core.initial_state(len(h)), time_major=False)
        return hk.BatchApply(hk.Linear(ACTIONS))(h), hk.BatchApply(hk.Linear(1))(h)[..., 0]

    net = hk.without_apply_rng(hk.transform(forward))

    def loss(
        params: Any, frames_BT: jax.Array, action: jax.Array, behaviour: jax.Array, reward: jax.Array
    ) -> jax.Array:
        logits, values = net.apply(params, frames_BT)
        policy, weight = logits[:, :-1], jnp.ones_like(reward)
        ratios = rlax.categorical_importance_sampling_ratios(policy, behaviour, action)
        estimate = jax.vmap(rlax.vtrace_td_error_and_advantage)
        traced = estimate(values[:, :-1], values[:, 1:], reward, 0.99 * weight, ratios)
        policy_loss = jax.vmap(rlax.policy_gradient_loss)(policy, action, traced.pg_advantage, weight).mean()
        entropy_loss = jax.vmap(rlax.entropy_loss)(policy, weight).mean()
        return policy_loss + 0.5 * jnp.mean(traced.errors**2) + 0.01 * entropy_loss

    rows, steps = 64, 20
    params = jax.eval_shape(net.init, KEY, frames(rows, steps + 1))
    data = frames(rows, steps + 1), ints(rows, steps), floats(rows, steps, ACTIONS), floats(rows, steps)
    optimizer = optax.chain(optax.clip_by_global_norm(40.0), optax.rmsprop(6e-4, 0.99, 0.1))
    return training(loss, params, data, sizes, weights=replicated(params, sizes), optimizer=optimizer)


def quantile(sizes: Sizes) -> Step:
    """A quantile regression DQN's update with double estimates, a target net and priorities."""
    count, width = 201, 4096

    def forward(frames: jax.Array) -> jax.Array:
        return hk.Linear(count * ACTIONS)(torso(frames, width)).reshape(-1, count, ACTIONS)

    net = hk.without_apply_rng(hk.transform(forward))
    optimizer = optax.adam(5e-5)

    def loss(
        params: Any, target: Any, first: jax.Array, action: jax.Array, reward: jax.Array, second: jax.Array
    ) -> Any:
        levels = jnp.broadcast_to((jnp.arange(count) + 0.5) / count, (len(action), count))
        learn = jax.vmap(partial(rlax.quantile_q_learning, huber_param=1.0))
        values, selected, later = (net.apply(p, x) for p, x in ((params, first), (params, second), (target, second)))
        errors = learn(values, levels, action, reward, jnp.full_like(reward, 0.99), selected, later)
        return errors.mean(), errors

    def run(state: Any, *data: Any) -> Any:
        params, target, optimizer_state, count = state
        (value, errors), gradient = jax.value_and_grad(loss, has_aux=True)(params, target, *data)
        updates, optimizer_state = optimizer.update(gradient, optimizer_state)
        params = optax.apply_updates(params, updates)
        target = rlax.conditional_update(params, target, count % 2500 == 0)
        return (params, target, optimizer_state, count + 1), value, errors

    rows = 512
    params = jax.eval_shape(net.init, KEY, frames(rows))
    state = params, params, jax.eval_shape(optimizer.init, params), ints()
    data = frames(rows), ints(rows), floats(rows), frames(rows)
    return Step(run=run, args=(state, *data), specs=(specs(state, HEAD, sizes), *batch_specs(data, sizes)))


def maximum_a_posteriori(sizes: Sizes) -> Step:
    """A continuous MPO update: twenty actions of each state are weighted by their values."""
    observation, action, samples = 223, 38, 20

    def mlp(outputs: int) -> Any:
        return hk.Sequential([hk.nets.MLP([4096, 4096, 2048], activate_final=True), hk.Linear(outputs)])

    actor = hk.without_apply_rng(hk.transform(lambda x: mlp(action)(x)))
    critic = hk.without_apply_rng(hk.transform(lambda x, a: mlp(1)(jnp.concatenate([x, a], -1))[..., 0]))

    def loss(nets: Any, old: Any, x: jax.Array, key: jax.Array) -> jax.Array:
        mean, before = actor.apply(nets["actor"], x), actor.apply(old["actor"], x)
        actions = before + 0.1 * jax.random.normal(key, (samples, *before.shape))
        log_probability = -0.5 * jnp.sum(((actions - mean) / 0.1) ** 2, -1)
        values = jax.vmap(critic.apply, (None, None, 0))(old["critic"], x, actions)
        temperature = rlax.LagrangePenalty(alpha=jax.nn.softplus(nets["temperature"]), epsilon=0.1)
        penalty = rlax.LagrangePenalty(alpha=jax.nn.softplus(nets["alpha"]), epsilon=0.01)
        divergence = 0.5 * jnp.sum(((mean - before) / 0.1) ** 2, -1)
        losses, _ = rlax.mpo_loss(log_probability, values, temperature, [(divergence, penalty)])
        return losses.mean()

    rows = floats(16_384, observation)
    nets = {
        "actor": jax.eval_shape(actor.init, KEY, rows),
        "critic": jax.eval_shape(critic.init, KEY, rows, floats(16_384, action)),
        "temperature": floats(),
        "alpha": floats(),
    }
    weights = specs(nets, COLUMNS_ROWS, sizes)
    step = training(loss, nets, (nets, rows, KEY), sizes, weights=weights, optimizer=optax.adamw(1e-4))
    return Step(run=step.run, args=step.args, specs=(step.specs[0], weights, *step.specs[2:]))


HEAD: Rules = (("*/linear/w", P(None, "model")), ("*/linear/b", P("model")), ("*/linear_1/w", P("model", None)))
COLUMNS_ROWS: Rules = (("*/mlp/*linear_[02]/w", P(None, "model")), ("*/mlp/*linear_1/w", P("model", None)))

PROGRAMS: dict[str, MakeProgram] = {
    "impala": actor_critic,
    "quantile dqn": quantile,
    "mpo": maximum_a_posteriori,
}
