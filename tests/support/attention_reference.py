"""Reference attention on one device, and arrays for it."""

import jax
import jax.numpy as jnp
import numpy as np

SIZE = 4


def dense(q, k, v, causal=True):
    """Softmax attention with all scores in one array."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    score = jnp.einsum("bshd,bthd->bhst", q, k) / np.sqrt(q.shape[-1])
    if causal:
        mask = np.tri(q.shape[1], dtype=bool).reshape(1, 1, q.shape[1], -1)
        score = jnp.where(mask, score, -jnp.inf)
    return jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(score, axis=-1), v)


def arrays(length, *, heads=8, groups=4, batch=2):
    """q, k, v and weights of the output."""
    generator = np.random.default_rng(0)
    shapes = [(batch, length, n, SIZE) for n in (heads, groups, groups, heads)]
    return [jnp.asarray(generator.normal(size=shape), jnp.float32) for shape in shapes]


def with_gradients(f):
    """A function of `arrays` that returns the output of `f` and the gradients of its weighted sum."""

    def weighted(q, k, v, weights):
        out = f(q, k, v)
        return jnp.sum(out * weights), out

    def both(q, k, v, weights):
        (_, out), gradients = jax.value_and_grad(weighted, argnums=(0, 1, 2), has_aux=True)(q, k, v, weights)
        return out, *gradients

    return both


def assert_close(found, expected, rtol=1e-5):
    for a, b in zip(found, expected, strict=True):
        assert np.linalg.norm(np.asarray(a) - np.asarray(b)) <= rtol * np.linalg.norm(np.asarray(b))
