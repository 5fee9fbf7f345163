"""MuJoCo XLA: batched rollouts of a body under a policy network, and gradients through pendula.

Shape suffixes: B environments, M features.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import optax
from mujoco import mjx
from support.train_steps.step import Sizes, Step

from sharding import P
from sharding.mesh import without_mesh

from . import MakeProgram
from .common import Rules, batch_specs, floats, specs, training

PACKAGE = "mujoco-mjx"
DATA = Path(mjx.__file__).parent / "test_data"


def world(file: str, iterations: int | None = None) -> tuple[Any, Any]:
    """A model of the package's test data, of small arrays, and the shapes of its state.

    Args:
        file: below the test data.
        iterations: the solver's, if not the file's; a single one can be differentiated in reverse.
    """
    read = mujoco.MjModel.from_xml_path(str(DATA / file))
    read.opt.iterations = iterations or read.opt.iterations
    with without_mesh():  # MuJoCo commits its model to one device
        model = mjx.put_model(read)
        model = jax.tree.map(lambda x: jnp.array(np.asarray(x)) if isinstance(x, jax.Array) else x, model)
    return model, jax.eval_shape(lambda: mjx.make_data(model))


def policy_of(model: Any, width: int) -> Any:
    """The shapes of a policy's weights."""
    observed = model.nq + model.nv
    return {"w1": floats(observed, width), "w2": floats(width, width), "w3": floats(width, max(model.nu, 1))}


def act(policy: Any, data: Any) -> jax.Array:
    """The controls of a state."""
    h = jnp.tanh(jnp.concatenate([data.qpos, data.qvel]) @ policy["w1"])
    return jnp.tanh(jnp.tanh(h @ policy["w2"]) @ policy["w3"])


def batched(tree: Any, rows: int) -> Any:
    """The shapes of many states."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape), x.dtype), tree)


def rollout(sizes: Sizes, *, file: str, rows: int, steps: int, width: int) -> Step:
    """The states after some steps, the observations of all, and the rewards."""
    model, data = world(file)
    policy = policy_of(model, width)

    def run(states: Any, policy: Any) -> Any:
        def one(state: Any, _: Any) -> Any:
            state = mjx.step(model, state.replace(ctrl=act(policy, state)))
            return state, (jnp.concatenate([state.qpos, state.qvel]), state.qvel[0] - 0.1 * (state.ctrl**2).sum())

        return jax.vmap(lambda state: jax.lax.scan(one, state, length=steps))(states)

    states = batched(data, rows)
    return Step(run=run, args=(states, policy), specs=(batch_specs(states, sizes), specs(policy, COLUMNS, sizes)))


def differentiated(sizes: Sizes, *, file: str, rows: int, steps: int, width: int) -> Step:
    """A train step of a policy through the dynamics, which are rematerialized."""
    model, _ = world(file, iterations=1)
    policy = policy_of(model, width)

    def loss(policy: Any, qpos: jax.Array, qvel: jax.Array) -> jax.Array:
        def rewards(qpos: jax.Array, qvel: jax.Array) -> jax.Array:
            state = mjx.make_data(model).replace(qpos=qpos, qvel=qvel)

            @jax.checkpoint
            def one(state: Any, _: Any) -> Any:
                state = mjx.step(model, state.replace(qfrc_applied=0 * state.qvel + act(policy, state)[0]))
                return state, (state.qpos**2).sum()

            return jax.lax.scan(one, state, length=steps)[1]

        return jax.vmap(rewards)(qpos, qvel).mean()

    batch = floats(rows, model.nq), floats(rows, model.nv)
    weights = specs(policy, COLUMNS, sizes)
    return training(loss, policy, batch, sizes, weights=weights, optimizer=optax.adam(3e-4))


COLUMNS: Rules = (("w1", P(None, "model")), ("w2", P("model", None)))

PROGRAMS: dict[str, MakeProgram] = {
    "humanoid, rollout": partial(rollout, file="humanoid/humanoid.xml", rows=32_768, steps=8, width=1024),
    "pendula, gradients": partial(differentiated, file="pendula.xml", rows=16_384, steps=16, width=1024),
}
