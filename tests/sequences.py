"""Attention on one device, and arrays for it."""

import jax
import jax.numpy as jnp
import numpy as np

SIZE = 4


def dense(q, k, v, causal=True):
    """Every score, in one array."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    score = jnp.einsum("bshd,bthd->bhst", q, k) / np.sqrt(q.shape[-1])
    if causal:
        seen = np.tri(q.shape[1], dtype=bool).reshape(1, 1, q.shape[1], -1)
        score = jnp.where(seen, score, -jnp.inf)
    return jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(score, axis=-1), v)


def arrays(length, *, heads=8, groups=4, batch=2):
    """q, k, v and weights of the output."""
    chance = np.random.default_rng(0)
    shapes = [(batch, length, n, SIZE) for n in (heads, groups, groups, heads)]
    return [jnp.asarray(chance.normal(size=shape), jnp.float32) for shape in shapes]


def with_gradients(f):
    """The output, and the gradients of its weighted sum, as a function of what `arrays` gives."""

    def weighted(q, k, v, weights):
        out = f(q, k, v)
        return jnp.sum(out * weights), out

    def both(q, k, v, weights):
        (_, out), gradients = jax.value_and_grad(weighted, argnums=(0, 1, 2), has_aux=True)(q, k, v, weights)
        return out, *gradients

    return both


def assert_close(found, wanted, rtol=1e-5):
    for a, b in zip(found, wanted, strict=True):
        assert np.linalg.norm(np.asarray(a) - np.asarray(b)) <= rtol * np.linalg.norm(np.asarray(b))
