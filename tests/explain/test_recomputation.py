"""Reshards of what a checkpoint recomputes: once more than in the forward pass, on every platform."""

import jax
import jax.numpy as jnp
import pytest
from support.compilers import COMPILERS, predicted_and_compiled

import sharding
from sharding import P

SIZES = {"data": 2, "model": 4}
WEIGHT = jax.ShapeDtypeStruct((256, 256), "float32")
WEIGHTS = [dict.fromkeys("qkvo", WEIGHT)] * 2
TABLE = jax.ShapeDtypeStruct((1024, 256), "float32")
TOKENS = jax.ShapeDtypeStruct((16, 64), "int32")


def block(w, x):
    h = x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
    q, k, v = (h @ w[name] for name in "qkv")
    return x + q * jax.nn.sigmoid(k) * v @ w["o"]


def train_step(*, half_inside=False, batch_first=False, is_remat=True):
    """A step over blocks; weights are converted outside of the checkpoint, or inside."""

    def converted(w):
        return jax.tree.map(lambda a: a.astype(jnp.bfloat16), w)

    def inner(w, x):
        return block(converted(w), x)

    layer = inner if half_inside else block

    def step(weights, table, tokens):
        def loss(weights, table):
            x = table.astype(jnp.bfloat16)[tokens]
            for w in weights:
                x = sharding.annotate(x, P("data")) if batch_first else x
                x = (jax.checkpoint(layer) if is_remat else layer)(w if half_inside else converted(w), x)
            return (x.astype(jnp.float32) @ table.T).mean()

        gradients = jax.grad(loss, (0, 1))(weights, table)
        return jax.tree.map(lambda p, g: p - g, (weights, table), gradients)

    return step


STEPS = {
    "not recomputed": train_step(is_remat=False),
    "converted before": train_step(),
    "converted inside": train_step(half_inside=True),
    "batch first": train_step(batch_first=True),
    "batch first, converted inside": train_step(half_inside=True, batch_first=True),
}
OPTIONS = {"in_shardings": P("data"), "donate_argnums": (0, 1)}


def moved(name):
    """The number of reshards of weights by all-gathers and all-to-alls."""
    with sharding.mesh(SIZES):
        ledger = sharding.jit(STEPS[name], **OPTIONS).complete(WEIGHTS, TABLE, TOKENS).communication()
    sizes = {256 * 256 * 2, 256 * 256}  # of a gathered weight, and of half of one
    return sum(c.count for c in ledger if c.result_bytes in sizes and c.is_move)


def test_weights_are_resharded_once_more():
    assert moved("not recomputed") < moved("converted before")


@pytest.mark.parametrize(("backend", "described"), COMPILERS.values())
@pytest.mark.parametrize("name", STEPS)
def test_as_compiled(name, backend, described):
    args = (WEIGHTS, TABLE, TOKENS)
    predicted, compiled = predicted_and_compiled(STEPS[name], args, backend, described, SIZES, **OPTIONS)
    assert predicted == compiled
