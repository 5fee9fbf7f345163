"""The online softmax over blocks of keys against the softmax over all keys at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sharding.sequence import attention_block

B, G, Q, S, T, D = 2, 1, 2, 3, 6, 4
MASKS = {
    "all": np.ones((S, T), bool),
    "causal": np.tri(S, T, 1, dtype=bool),
    "an empty query": np.arange(S)[:, None] * np.ones((1, T), int) > 0,
    "an empty block": (np.arange(T) >= 3)[None] & np.ones((S, 1), bool),
}


def drawn(*shape, seed):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * 3, jnp.float32)


QUERIES, KEYS, VALUES = drawn(B, G, Q, S, D, seed=0), drawn(B, G, T, D, seed=1), drawn(B, G, T, D, seed=2)


def by_blocks(q, k, v, mask, size):
    state = attention_block.empty_state(q)
    for at in range(0, T, size):
        part = slice(at, at + size)
        state = attention_block.update(state, q, k[:, :, part], v[:, :, part], mask[:, part])
    return attention_block.finalize(state)


def at_once(q, k, v, mask):
    """Zero where nothing is attended to."""
    score = jnp.where(mask, jnp.einsum("bgqsd,bgtd->bgqst", q, k) / np.sqrt(D), -jnp.inf)
    met = mask.any(axis=1)
    total = jnp.where(met, jax.nn.logsumexp(jnp.where(met[:, None], score, 0.0), axis=-1), 0.0)
    weight = jnp.where(met[:, None], jnp.exp(score - total[..., None]), 0.0)
    return jnp.einsum("bgqst,bgtd->bgqsd", weight, v), total


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("size", [1, 2, 4, 6])
def test_blocks_of_any_size(name, size):
    mask = MASKS[name]
    found, expected = by_blocks(QUERIES, KEYS, VALUES, mask, size), at_once(QUERIES, KEYS, VALUES, mask)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MASKS)
def test_gradients_of_blocks_add_up(name):
    mask, cotangent = MASKS[name], drawn(B, G, Q, S, D, seed=3)
    out, total = by_blocks(QUERIES, KEYS, VALUES, mask, 2)
    queries = attention_block.QueryResiduals(QUERIES, cotangent, total, jnp.sum(out * cotangent, axis=-1))
    parts = [slice(at, at + 2) for at in range(0, T, 2)]
    found = [attention_block.gradients(queries, KEYS[:, :, p], VALUES[:, :, p], mask[:, p]) for p in parts]
    dq = sum(one[0] for one in found)
    dk, dv = (jnp.concatenate([one[i] for one in found], axis=2) for i in (1, 2))
    expected = jax.grad(lambda *args: jnp.sum(at_once(*args, mask)[0] * cotangent), argnums=(0, 1, 2))(
        QUERIES, KEYS, VALUES
    )
    for a, b in zip((dq, dk, dv), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
