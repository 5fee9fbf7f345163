"""Flashbax: Q-learning from replay buffers on the devices, uniform and prioritised, with Haiku's networks."""

from __future__ import annotations

from functools import partial
from typing import Any

import flashbax as fbx
import haiku as hk
import jax
import jax.numpy as jnp
import optax
from support.train_steps.step import Sizes, Step

from sharding import P

from . import MakeProgram
from .common import KEY, Rules, batch_specs, floats, ints, specs

PACKAGE = "flashbax"
ACTIONS = 18


def values_of_frames(frames: jax.Array) -> jax.Array:
    """Values of actions from stacked frames."""
    x = frames.astype(jnp.float32) / 255
    for channels, kernel, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
        x = jax.nn.relu(hk.Conv2D(channels, kernel, stride)(x))
    return hk.nets.MLP([2048, ACTIONS])(hk.Flatten()(x))


def values_of_vectors(observations: jax.Array) -> jax.Array:
    """Values of actions from vectors."""
    return hk.nets.MLP([4096, 4096, ACTIONS])(observations)


def transition(observation: Any) -> dict[str, Any]:
    """The shapes of a transition."""
    return {
        "observation": observation,
        "action": ints(),
        "reward": floats(),
        "done": jax.ShapeDtypeStruct((), jnp.bool_),
    }


def learned(
    sizes: Sizes,
    *,
    make: Any,
    network: Any,
    observation: Any,
    environments: int,
    capacity: int,
    rows: int,
    rules: Rules,
) -> Step:
    """Adds a transition of each environment, samples, and takes a step of double Q-learning."""
    buffer = make(
        max_length=capacity, min_length=rows, sample_batch_size=rows, add_sequences=False, add_batch_size=environments
    )
    net = hk.without_apply_rng(hk.transform(network))
    optimizer = optax.adam(1e-4)
    one = transition(observation)
    params = jax.eval_shape(net.init, KEY, floats(1, *observation.shape, dtype=observation.dtype))

    def errors(params: Any, target: Any, pair: Any) -> jax.Array:
        first, second = pair.first, pair.second
        chosen = jnp.take_along_axis(net.apply(params, first["observation"]), first["action"][:, None], 1)[:, 0]
        best = net.apply(params, second["observation"]).argmax(-1)
        value = jnp.take_along_axis(net.apply(target, second["observation"]), best[:, None], 1)[:, 0]
        return first["reward"] + 0.99 * (1 - first["done"]) * jax.lax.stop_gradient(value) - chosen

    def run(state: Any, key: jax.Array, steps: Any) -> Any:
        stored, params, target, optimizer_state = state
        stored = buffer.add(stored, steps)
        sample = buffer.sample(stored, key)

        def loss(params: Any) -> Any:
            found = errors(params, target, sample.experience)
            weight = 1.0
            if hasattr(sample, "probabilities"):
                weight = (1 / sample.probabilities) ** 0.4
                weight = weight / weight.max()
            return (weight * optax.huber_loss(found)).mean(), found

        (value, found), gradient = jax.value_and_grad(loss, has_aux=True)(params)
        if hasattr(sample, "probabilities"):
            stored = buffer.set_priorities(stored, sample.indices, jnp.abs(found) + 1e-6)
        updates, optimizer_state = optimizer.update(gradient, optimizer_state, params)
        params = optax.apply_updates(params, updates)
        target = optax.incremental_update(params, target, 0.005)
        return (stored, params, target, optimizer_state), value

    stored = jax.eval_shape(buffer.init, one)
    steps = jax.tree.map(lambda x: jax.ShapeDtypeStruct((environments, *x.shape), x.dtype), one)
    weights = specs(params, rules, sizes)
    experience = batch_specs(stored.experience, sizes)
    stored_specs = jax.tree.map(lambda _: P(), stored)
    stored_specs = stored_specs.replace(experience=experience)
    state = stored, params, params, jax.eval_shape(optimizer.init, params)
    return Step(
        run=run,
        args=(state, KEY, steps),
        specs=((stored_specs, weights, weights, None), None, batch_specs(steps, sizes)),
    )


PIXELS: Rules = (("mlp/*linear_0/w", P(None, "model")), ("mlp/*linear_1/w", P("model", None)))
WIDE: Rules = (
    ("mlp/*linear_0/w", P(None, "model")),
    ("mlp/*linear_1/w", P("model", None)),
    ("mlp/*linear_2/w", P(None, None)),
)

PROGRAMS: dict[str, MakeProgram] = {
    "frames, prioritised": partial(
        learned,
        make=fbx.make_prioritised_flat_buffer,
        network=values_of_frames,
        observation=jax.ShapeDtypeStruct((84, 84, 4), jnp.uint8),
        environments=64,
        capacity=131_072,
        rows=512,
        rules=PIXELS,
    ),
    "vectors, uniform": partial(
        learned,
        make=fbx.make_flat_buffer,
        network=values_of_vectors,
        observation=floats(376),
        environments=1024,
        capacity=1_048_576,
        rows=8192,
        rules=WIDE,
    ),
}
