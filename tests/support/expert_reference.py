"""Slow token-by-token reference of MoE layers, and layers to compare with it."""

import functools
import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sharding import expert

BATCH, LENGTH, FEATURES, HIDDEN, EXPERTS = 8, 12, 16, 32, 8


def layer(**options):
    """An MoE layer with deterministic initial values."""
    options = {"features": FEATURES, "hidden": HIDDEN, "num_experts": EXPERTS, "top_k": 2, **options}
    return _initial(**options)


@functools.partial(jax.jit, static_argnames=[*inspect.signature(expert.MoE.__init__).parameters])
def _initial(**options):
    moe = expert.MoE(rngs=nnx.Rngs(0), **options)
    if isinstance(moe.router, expert.NoisyTopK):  # its maps are initialised to 0
        for i, param in enumerate([moe.router.gate, moe.router.noise]):
            param[...] = jax.random.normal(jax.random.key(i), param.shape) / math.sqrt(FEATURES)
    return moe


def tokens():
    return jax.random.normal(jax.random.key(1), (BATCH, LENGTH, FEATURES))


def within_capacity(routing, capacity):
    """Whether each choice is within capacity, [G, S, K]: all first choices in token order, then all second choices."""
    chosen, dispatched = np.asarray(routing.experts_GSK), np.asarray(routing.wanted_GSK)
    found = np.zeros(chosen.shape, bool)
    for g in range(chosen.shape[0]):
        taken = {}
        for k in range(chosen.shape[2]):
            for s in range(chosen.shape[1]):
                e = int(chosen[g, s, k])
                if dispatched[g, s, k]:
                    found[g, s, k] = taken.get(e, 0) < capacity
                    taken[e] = taken.get(e, 0) + 1
    return found


def gelu(x):
    """The tanh approximation, JAX's default."""
    return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def token_by_token(moe, x_GSM, routing, capacity=math.inf):
    """The layer's output, one token and expert at a time."""
    x, y = np.asarray(x_GSM, np.float64), np.zeros(x_GSM.shape)
    up, down = np.asarray(moe.up[...], np.float64), np.asarray(moe.down[...], np.float64)
    chosen, weights, dispatched = (
        np.asarray(routing.experts_GSK),
        np.asarray(routing.weights_GSK),
        within_capacity(routing, capacity),
    )
    for g, s, k in np.ndindex(dispatched.shape):
        if dispatched[g, s, k]:
            e = chosen[g, s, k]
            y[g, s] += weights[g, s, k] * (gelu(x[g, s] @ up[e]) @ down[e])
    return y


@jax.jit
def call(moe, x, key=None):
    return moe(x, key)


@jax.jit
def route(moe, x_GSM, key=None):
    return moe.router(x_GSM, key)


def value_and_grad(moe, x, key):
    """A scalar loss with output and balance as auxiliary values, and the gradients of `moe` and `x`."""

    def scalar(moe, x):
        y, balance = moe(x, key)
        return jnp.sum(jnp.sin(y)) / y.size + balance.auxiliary_loss, (y, balance)

    return jax.value_and_grad(scalar, argnums=(0, 1), has_aux=True)(moe, x)
