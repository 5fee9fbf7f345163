"""Sampling of text from a language model, token by token."""

from typing import Any, Protocol

import jax
import jax.numpy as jnp


class LanguageModel(Protocol):
    """A generative model: tokens_BS -> logits_BSV, for at most `config.context` tokens."""

    config: Any

    def __call__(self, tokens_BS: jax.Array) -> jax.Array: ...


def generate(
    model: LanguageModel, prompt_BS: jax.Array, *, steps: int, key: jax.Array, temperature: float = 1.0
) -> jax.Array:
    """The prompt and `steps` sampled tokens, [B, S + steps]; temperature 0 is greedy.

    Every step runs the model on the last `context` tokens, without a KV cache.
    """
    batch, length = prompt_BS.shape
    width = min(model.config.context, length + steps)

    def step(i: jax.Array, tokens: jax.Array) -> jax.Array:
        start = jnp.maximum(i - width, 0)
        window_BS = jax.lax.dynamic_slice_in_dim(tokens, start, width, axis=1)
        # Attention is causal: padding after the last token is masked.
        logits_BV = jax.lax.dynamic_index_in_dim(model(window_BS), i - 1 - start, axis=1, keepdims=False)
        next_B = _sample(logits_BV.astype(jnp.float32), jax.random.fold_in(key, i), temperature)
        return jax.lax.dynamic_update_slice_in_dim(tokens, next_B.astype(tokens.dtype)[:, None], i, axis=1)

    tokens = jnp.concatenate([prompt_BS, jnp.zeros((batch, steps), prompt_BS.dtype)], axis=1)
    return jax.lax.fori_loop(length, length + steps, step, tokens)


def _sample(logits_BV: jax.Array, key: jax.Array, temperature: float) -> jax.Array:
    if temperature == 0:
        return jnp.argmax(logits_BV, axis=-1)
    return jax.random.categorical(key, logits_BV / temperature, axis=-1)
