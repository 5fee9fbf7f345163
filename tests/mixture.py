"""Layers of experts token by token, as slow and as obvious as can be."""

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
    """Its own values; equal options give equal ones."""
    options = {"features": FEATURES, "hidden": HIDDEN, "num_experts": EXPERTS, "top_k": 2, **options}
    return _initial(**options)


@functools.partial(jax.jit, static_argnames=[*inspect.signature(expert.MoE.__init__).parameters])
def _initial(**options):
    made = expert.MoE(rngs=nnx.Rngs(0), **options)
    if isinstance(made.router, expert.NoisyTopK):  # its maps begin at 0
        for i, param in enumerate([made.router.gate, made.router.noise]):
            param[...] = jax.random.normal(jax.random.key(i), param.shape) / math.sqrt(FEATURES)
    return made


def tokens():
    return jax.random.normal(jax.random.key(1), (BATCH, LENGTH, FEATURES))


def kept(routing, capacity):
    """Whether each choice finds a place, [G, S, K]: first all first choices in the order of tokens, then the second."""
    chosen, wanted = np.asarray(routing.experts_GSK), np.asarray(routing.wanted_GSK)
    found = np.zeros(chosen.shape, bool)
    for g in range(chosen.shape[0]):
        taken = {}
        for k in range(chosen.shape[2]):
            for s in range(chosen.shape[1]):
                e = int(chosen[g, s, k])
                if wanted[g, s, k]:
                    found[g, s, k] = taken.get(e, 0) < capacity
                    taken[e] = taken.get(e, 0) + 1
    return found


def gelu(x):
    """By tanh, as JAX's default."""
    return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def by_token(made, x_GSM, routing, capacity=math.inf):
    """Each token through its experts, one by one."""
    x, y = np.asarray(x_GSM, np.float64), np.zeros(x_GSM.shape)
    up, down = np.asarray(made.up[...], np.float64), np.asarray(made.down[...], np.float64)
    chosen, weights, places = np.asarray(routing.experts_GSK), np.asarray(routing.weights_GSK), kept(routing, capacity)
    for g, s, k in np.ndindex(places.shape):
        if places[g, s, k]:
            e = chosen[g, s, k]
            y[g, s] += weights[g, s, k] * (gelu(x[g, s] @ up[e]) @ down[e])
    return y


@jax.jit
def call(made, x, key=None):
    return made(x, key)


@jax.jit
def route(made, x_GSM, key=None):
    return made.router(x_GSM, key)


def value_and_grad(made, x, key):
    """A scalar of the output and the auxiliary loss, with the output, its balance and all gradients."""

    def scalar(made, x):
        y, balance = made(x, key)
        return jnp.sum(jnp.sin(y)) / y.size + balance.auxiliary_loss, (y, balance)

    return jax.value_and_grad(scalar, argnums=(0, 1), has_aux=True)(made, x)
