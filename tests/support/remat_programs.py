"""Programs with blocks under `remat.auto`, and what `remat.fit` makes of them on two devices."""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name as name

import sharding
from sharding import P, kernels, remat

from .peak_memory import floats

auto = functools.partial(jax.checkpoint, policy=remat.auto)


def mlp(ws, x):
    for w in ws:
        x = auto(lambda w, x: jnp.tanh(name(jnp.sin(x), "sin") @ w))(w, x)
    return jnp.sum(x**2)


def scanned(ws, x):
    return jnp.sum(
        jax.lax.scan(lambda x, w: (auto(lambda w, x: x + jnp.tanh(name(x @ w, "up")))(w, x), None), x, ws)[0]
    )


def attention(ws, x):
    @auto
    def layer(w, x):
        q, k, v = (name(x @ w[i], "qkv") for i in range(3))
        return x + name(jax.nn.softmax(q @ k.mT) @ v, "out") @ w[3]

    for w in ws:
        x = layer(w, x)
    return jnp.mean(x**2)


def gated(ws, x):
    for w in ws:
        x = auto(lambda w, x: x + (jax.nn.silu(x @ w[0]) * (x @ w[1])) @ w[2])(w, x)
    return jnp.sum(x)


def normed(ws, x):
    for w in ws:
        x = auto(lambda w, x: x + jax.nn.gelu(kernels.rms_norm(x, w[0]) @ w))(w, x)
    return jnp.sum(x)


def convolved(ws, x):
    for w in ws:
        x = auto(lambda w, x: jax.nn.relu(jax.lax.conv_general_dilated(x, w, (1, 1), "SAME")))(w, x)
    return jnp.sum(x)


def nested(ws, x):
    for w in ws:
        x = auto(lambda w, x: auto(lambda x: jnp.sin(jnp.sin(x) @ w))(x) @ w)(w, x)
    return jnp.sum(x)


def groups(ws, x):
    for k, w in enumerate(ws):
        x = jax.checkpoint(lambda w, x: jnp.tanh(name(jnp.sin(x) @ w, "h")), policy=remat.auto[k])(w, x)
    return jnp.sum(x**2)


def shared_weight(ws, x):
    for _ in range(4):
        x = auto(lambda w, x: jnp.sin(jnp.cos(x) @ w))(ws[0], x)
    return jnp.sum(x) + jnp.sum(ws[1])


def looped(ws, x):
    @auto
    def layer(w, x):
        return jax.lax.fori_loop(0, 3, lambda _, x: jnp.tanh(name(x @ w, "inside")), x)

    for w in ws:
        x = layer(w, x)
    return jnp.sum(x)


def partly(ws, x):
    for k, w in enumerate(ws):
        layer = lambda w, x: jnp.sin(jnp.sin(x) @ w)  # noqa: E731
        x = (auto(layer) if k % 2 else layer)(w, x)
    return jnp.sum(x)


def mixed_types(ws, x):
    for w in ws:
        x = auto(lambda w, x: x + name(jnp.tanh(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)), "low"))(w, x)
    return jnp.sum(x)


def scheduled(ws, x):
    return jnp.sum(remat.scan(lambda x, w: (jnp.tanh(jnp.sin(x) @ w), None), x, ws, schedule=remat.auto)[0])


X, SQUARES, STACK = floats(512, 32), [floats(32, 32)] * 4, floats(4, 32, 32)
PROGRAMS = {
    mlp: (SQUARES, X),
    scanned: (STACK, X),
    attention: ([floats(4, 32, 32)] * 2, floats(8, 64, 32)),
    gated: ([floats(3, 32, 32)] * 3, X),
    normed: (SQUARES, X),
    convolved: ([floats(8, 8, 3, 3)] * 3, floats(4, 8, 16, 16)),
    nested: (SQUARES[:2], X),
    groups: (SQUARES, X),
    shared_weight: (SQUARES[:2], X),
    looped: (SQUARES[:2], X),
    partly: (SQUARES, X),
    mixed_types: (SQUARES, X),
    scheduled: (floats(12, 32, 32), X),
}


def two_devices():
    return sharding.mesh(data=2, devices=jax.devices()[:2])


def fitted(fun, args, memory_bytes, *, peak="auto", **options):
    with two_devices():
        step = sharding.jit(jax.value_and_grad(fun), in_shardings=(None, P("data")))
        return remat.fit(step, *args, memory_bytes=memory_bytes, peak=peak, **options)


def arrays_of(args):
    keys = iter(jax.random.split(jax.random.key(0), 64))
    return jax.tree.map(lambda leaf: jax.random.normal(next(keys), leaf.shape) / 6, args)
