"""Brax: the updates of its agents, and its physics in many environments."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from brax import envs
from brax.training.acting import generate_unroll
from brax.training.agents.ppo import losses as ppo_losses
from brax.training.agents.ppo import networks as ppo_networks
from brax.training.agents.sac import losses as sac_losses
from brax.training.agents.sac import networks as sac_networks
from brax.training.types import Transition
from support.train_steps.step import Sizes, Step

from sharding import P
from sharding.mesh import without_mesh

from . import MakeProgram
from .common import KEY, Rules, batch_specs, floats, specs, training

PACKAGE = "brax"
OBSERVATION, ACTION = 376, 17


def transition(*batch: int, extras: Any) -> Transition:
    """The shapes of a batch of transitions of the humanoid."""
    observations = floats(*batch, OBSERVATION)
    return Transition(
        observation=observations,
        action=floats(*batch, ACTION),
        reward=floats(*batch),
        discount=floats(*batch),
        next_observation=observations,
        extras=extras | {"state_extras": {"truncation": floats(*batch)}},
    )


def proximal_policy(sizes: Sizes, *, width: int, rows: int, weights: Rules) -> Step:
    """A minibatch's update of PPO with generalized advantages."""
    networks = ppo_networks.make_ppo_networks(
        OBSERVATION, ACTION, policy_hidden_layer_sizes=(width,) * 4, value_hidden_layer_sizes=(width,) * 5
    )

    def init(key: jax.Array) -> ppo_losses.PPONetworkParams:
        k1, k2 = jax.random.split(key)
        return ppo_losses.PPONetworkParams(networks.policy_network.init(k1), networks.value_network.init(k2))

    def loss(params: Any, data: Transition, key: jax.Array) -> jax.Array:
        return ppo_losses.compute_ppo_loss(params, None, data, key, networks, entropy_cost=1e-2, discounting=0.97)[0]

    params = jax.eval_shape(init, KEY)
    sampled = {"raw_action": ACTION, "distribution_params": 2 * ACTION}
    extras = {name: floats(rows, 20, size) for name, size in sampled.items()} | {"log_prob": floats(rows, 20)}
    data = transition(rows, 20, extras={"policy_extras": extras})
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-4))
    return training(loss, params, (data, KEY), sizes, weights=specs(params, weights, sizes), optimizer=optimizer)


def soft_actor_critic(sizes: Sizes) -> Step:
    """An update of SAC: the temperature, two critics, the actor and the targets' averages."""
    networks = sac_networks.make_sac_networks(
        OBSERVATION, ACTION, hidden_layer_sizes=(4096, 4096, 4096), q_network_layer_norm=True
    )
    losses = sac_losses.make_losses(networks, reward_scaling=1.0, discounting=0.99, action_size=ACTION)
    temperature_loss, critic_loss, actor_loss = losses
    optimizer = optax.adam(1e-4)

    def init(key: jax.Array) -> Any:
        k1, k2 = jax.random.split(key)
        nets = {
            "temperature": jnp.zeros(()),
            "q": networks.q_network.init(k1),
            "policy": networks.policy_network.init(k2),
        }
        return nets, nets["q"], {name: optimizer.init(net) for name, net in nets.items()}

    def run(state: Any, data: Transition, key: jax.Array) -> Any:
        nets, target, optimizers = state
        policy, q, scale = nets["policy"], nets["q"], jnp.exp(nets["temperature"])
        keys = jax.random.split(key, 3)
        found = {
            "temperature": jax.value_and_grad(temperature_loss)(nets["temperature"], policy, None, data, keys[0]),
            "q": jax.value_and_grad(critic_loss)(q, policy, None, target, scale, data, keys[1]),
            "policy": jax.value_and_grad(actor_loss)(policy, None, q, scale, data, keys[2]),
        }
        updates = {name: optimizer.update(gradient, optimizers[name]) for name, (_, gradient) in found.items()}
        nets = {name: optax.apply_updates(nets[name], updates[name][0]) for name in nets}
        target = optax.incremental_update(nets["q"], target, 0.005)
        return (nets, target, {name: updates[name][1] for name in nets}), sum(value for value, _ in found.values())

    data, state = transition(32_768, extras={}), jax.eval_shape(init, KEY)
    return Step(run=run, args=(state, data, KEY), specs=(specs(state, CRITIC, sizes), batch_specs(data, sizes), None))


def unroll(sizes: Sizes, *, name: str, backend: str, count: int) -> Step:
    """Ten steps of a policy in each of many worlds, with resets of those that are done."""
    with without_mesh():  # MuJoCo commits its model to one device
        world = envs.get_environment(name, backend=backend)
        world.sys = jax.tree.map(lambda x: jnp.array(np.asarray(x)) if isinstance(x, jax.Array) else x, world.sys)
    env = envs.training.wrap(world, episode_length=1000)
    networks = ppo_networks.make_ppo_networks(
        env.observation_size, env.action_size, policy_hidden_layer_sizes=(512,) * 4
    )
    policy_of = ppo_networks.make_inference_fn(networks)

    def run(state: Any, params: Any, key: jax.Array) -> Any:
        return generate_unroll(env, state, policy_of(params), key, 10, extra_fields=("truncation",))

    # Brax reads the number of worlds off the shape of old-style keys.
    state = jax.eval_shape(lambda: env.reset(jax.random.split(jax.random.PRNGKey(0), count)))
    params = None, jax.eval_shape(networks.policy_network.init, KEY)
    rows = P(("data", "fsdp", "model"))
    return Step(run=run, args=(state, params, KEY), specs=(batch_specs(state, sizes, rows), None, None))


WIDE: Rules = (
    ("*/hidden_[024]/kernel", P(None, "model")),
    ("*/hidden_[024]/bias", P("model")),
    ("*/hidden_[13]/kernel", P("model", None)),
)
CRITIC: Rules = (("*/hidden_[02]/kernel", P(None, "model")), ("*/hidden_1/kernel", P("model", None)))

PROGRAMS: dict[str, MakeProgram] = {
    "ppo, data": partial(proximal_policy, width=1024, rows=8192, weights=(("*", P()),)),
    "ppo, tensor parallel": partial(proximal_policy, width=4096, rows=2048, weights=WIDE),
    "sac": soft_actor_critic,
    "humanoid, generalized": partial(unroll, name="humanoid", backend="generalized", count=16_384),
    "ant, spring": partial(unroll, name="ant", backend="spring", count=65_536),
}
