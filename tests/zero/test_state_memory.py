"""Predicted memory on described devices against the formulas of the ZeRO paper."""

import math

import jax
import jax.numpy as jnp
import optax
import pytest

import sharding
from sharding import P, zero

LAYERS, FEATURES, HIDDEN = 25, 24 * 64, 763 * 128
"""7.5 billion parameters, whose shards are whole tiles."""
DEVICES = 64


def params():
    a, b = (LAYERS, FEATURES, HIDDEN), (LAYERS, HIDDEN, FEATURES)
    return {"a": jax.ShapeDtypeStruct(a, jnp.bfloat16), "b": jax.ShapeDtypeStruct(b, jnp.bfloat16)}


def loss(params, x):
    @jax.checkpoint
    def layer(x, w):
        return x + jnp.tanh(x @ w["a"]) @ w["b"], None

    return jnp.square(jax.lax.scan(layer, x, params)[0].astype(jnp.float32)).mean()


def memory(stage):
    with sharding.mesh(data=DEVICES, devices="v5p:4x4x4"):
        tx = zero.shard(optax.adamw(1e-3), stage=stage, master=True)
        specs = zero.specs(params(), stage=stage)

        def step(state, x):
            own, inner = state
            value, gradients = jax.value_and_grad(loss)(own, x)
            return tx.apply(gradients, inner, own), value

        step = sharding.jit(step, donate_argnums=0, in_shardings=((specs.params, None), P("data")))
        state = params(), jax.eval_shape(tx.init, params())
        return step.complete(state, jax.ShapeDtypeStruct((16 * DEVICES, FEATURES), jnp.bfloat16)).memory()


def after_the_backward(report):
    """Bytes in use once all gradients exist: as the first weight is updated, behind the last entry of the loss."""
    last = max(k for k, moment in enumerate(report.timeline) if "loss" in moment.source)
    return report.timeline[last + 1].num_bytes


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_model_states_of_seven_and_a_half_billion_parameters(stage):
    num_params = sum(math.prod(leaf.shape) for leaf in params().values())
    assert num_params == pytest.approx(7.5e9, rel=1e-3)
    found = after_the_backward(memory(stage))
    assert found == pytest.approx(zero.model_state_bytes(num_params, DEVICES, stage), rel=5e-3)
