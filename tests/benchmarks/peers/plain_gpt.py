"""A GPT's train step in plain JAX of any release, unrolled, with Adam written out: what planners are compared on.

B batch, S sequence, D features, H heads, K features of a head, F hidden features, V vocabulary; float32.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Sizes(NamedTuple):
    """Of the model and its batch."""

    layers: int
    features: int = 2048
    heads: int = 16
    hidden: int = 8192
    vocab: int = 32_768
    length: int = 1024
    batch: int = 64


def arguments(sizes: Sizes) -> tuple[Any, jax.ShapeDtypeStruct]:
    """The shapes of the state and of the tokens [B, S + 1]."""
    square, wide, high = (
        (sizes.features, sizes.features),
        (sizes.features, sizes.hidden),
        (sizes.hidden, sizes.features),
    )
    layer = {"q": square, "k": square, "v": square, "o": square, "up": wide, "down": high}
    table = {"embed": (sizes.vocab, sizes.features), "head": (sizes.features, sizes.vocab)}
    shapes = {**table, "layers": [dict(layer) for _ in range(sizes.layers)]}

    def arrays() -> Any:
        return jax.tree.map(
            lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), shapes, is_leaf=lambda x: isinstance(x, tuple)
        )

    state = {"params": arrays(), "mu": arrays(), "nu": arrays(), "count": jax.ShapeDtypeStruct((), jnp.float32)}
    return state, jax.ShapeDtypeStruct((sizes.batch, sizes.length + 1), jnp.int32)


def norm(x_BSD: jax.Array) -> jax.Array:
    return x_BSD * lax.rsqrt(jnp.mean(x_BSD**2, -1, keepdims=True) + 1e-6)


def block(w: Any, x_BSD: jax.Array, heads: int) -> jax.Array:
    """A layer of causal attention and an MLP."""
    batch, length, features = x_BSD.shape
    h_BSD = norm(x_BSD)
    q_BSHK, k_BSHK, v_BSHK = [(h_BSD @ w[n]).reshape(batch, length, heads, features // heads) for n in "qkv"]
    scores_BHST = jnp.einsum("bshk,bthk->bhst", q_BSHK, k_BSHK) / math.sqrt(features // heads)
    causal_ST = jnp.tril(jnp.ones((length, length), bool))
    weights_BHST = jax.nn.softmax(jnp.where(causal_ST, scores_BHST, -1e30))
    mixed_BSD = jnp.einsum("bhst,bthk->bshk", weights_BHST, v_BSHK).reshape(x_BSD.shape)
    x_BSD = x_BSD + mixed_BSD @ w["o"]
    return x_BSD + jax.nn.gelu(norm(x_BSD) @ w["up"]) @ w["down"]


def loss(params: Any, tokens: jax.Array, heads: int) -> jax.Array:
    """The mean cross entropy of the next token."""
    x_BSD = params["embed"][tokens[:, :-1]]
    for w in params["layers"]:
        x_BSD = block(w, x_BSD, heads)
    scores_BSV = jax.nn.log_softmax(norm(x_BSD) @ params["head"])
    return -jnp.mean(jnp.take_along_axis(scores_BSV, tokens[:, 1:, None], -1))


def train_step(sizes: Sizes) -> Any:
    """(state, tokens) -> (state, loss)."""

    def step(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(state["params"], tokens, sizes.heads)
        count = state["count"] + 1
        mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mu"], gradients)
        nu = jax.tree.map(lambda n, g: 0.999 * n + 0.001 * g * g, state["nu"], gradients)
        rate = 1e-4 * jnp.sqrt(1 - 0.999**count) / (1 - 0.9**count)
        params = jax.tree.map(lambda p, m, n: p - rate * m / (jnp.sqrt(n) + 1e-8), state["params"], mu, nu)
        return {"params": params, "mu": mu, "nu": nu, "count": count}, value

    return step
