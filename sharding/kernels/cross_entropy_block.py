"""Cross entropy of a block of logits: what one step of a loop over the vocabulary adds, forward and backward.

With logits l of a token, its label y, and z = softcap tanh(l / softcap) or z = l,

    loss = logsumexp(z) - z_y,  d loss / d l_v = (softmax(z)_v - [v = y]) (1 - (z_v / softcap)^2).

The same formulas run in a `scan` over blocks and inside of kernels. The logsumexp is accumulated online (Milakov and
Gimelshein, arXiv:1805.02867, section 3).

Shape suffixes: T tokens, M features, C columns of the block, 1 a dim of size 1.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Softmax(NamedTuple):
    """Of the columns so far."""

    maximum_T1: jax.Array
    total_T1: jax.Array
    """Sum of exp(z - maximum)."""
    target_T1: jax.Array
    """z of the label, 0 if it is in none of the columns."""

    @property
    def logsumexp_T1(self) -> jax.Array:
        """log sum exp z."""
        return self.maximum_T1 + jnp.log(self.total_T1)


class Cotangents(NamedTuple):
    """What the backward pass knows of a token."""

    labels_T1: jax.Array
    """Column of the label in all columns; any other number if it is in none."""
    logsumexp_T1: jax.Array
    """Over the whole vocabulary."""
    of_softmax_T1: jax.Array
    """Cotangent of the logsumexp, to which the loss adds its own."""
    of_target_T1: jax.Array
    """Cotangent of the label's z."""


def empty(tokens: int) -> Softmax:
    """Of no columns."""
    zeros_T1 = jnp.zeros((tokens, 1), jnp.float32)
    return Softmax(jnp.full((tokens, 1), -jnp.inf, jnp.float32), zeros_T1, zeros_T1)


def product(x_TM: jax.Array, w: jax.Array, is_transposed: bool) -> jax.Array:
    """Logits [T, C] in float32, with w [M, C] or, transposed, [C, M]."""
    return _dot(x_TM, w, 1, 1 if is_transposed else 0)


def capped(logits_TC: jax.Array, bias_1C: jax.Array | None, softcap: float | None) -> jax.Array:
    """z of the logits, float32."""
    if bias_1C is not None:
        logits_TC = logits_TC + bias_1C.astype(jnp.float32)
    return logits_TC if softcap is None else softcap * jnp.tanh(logits_TC / softcap)


def added(so_far: Softmax, z_TC: jax.Array, is_label_TC: jax.Array) -> Softmax:
    """With the columns of a block, each row of which has a finite one."""
    maximum_T1 = jnp.maximum(so_far.maximum_T1, jnp.max(z_TC, axis=1, keepdims=True))
    scale_T1 = jnp.exp(so_far.maximum_T1 - maximum_T1)
    total_T1 = scale_T1 * so_far.total_T1 + jnp.sum(jnp.exp(z_TC - maximum_T1), axis=1, keepdims=True)
    target_T1 = jnp.sum(jnp.where(is_label_TC, z_TC, 0.0), axis=1, keepdims=True)
    return Softmax(maximum_T1, total_T1, so_far.target_T1 + target_T1)


def merged(one: Softmax, other: Softmax) -> Softmax:
    """Of the columns of both; the other has some."""
    maximum_T1 = jnp.maximum(one.maximum_T1, other.maximum_T1)
    totals_T1 = (part.total_T1 * jnp.exp(part.maximum_T1 - maximum_T1) for part in (one, other))
    return Softmax(maximum_T1, sum(totals_T1, jnp.zeros(())), one.target_T1 + other.target_T1)


def of_logits(z_TC: jax.Array, is_label_TC: jax.Array, cts: Cotangents, softcap: float | None) -> jax.Array:
    """Cotangent of the logits, float32."""
    of_z_TC = jnp.exp(z_TC - cts.logsumexp_T1) * cts.of_softmax_T1
    of_z_TC = of_z_TC + jnp.where(is_label_TC, cts.of_target_T1, 0.0)
    return of_z_TC if softcap is None else of_z_TC * (1 - jnp.square(z_TC / softcap))


def of_x(ct_TC: jax.Array, w: jax.Array, is_transposed: bool) -> jax.Array:
    """What a block adds to the gradient of x: [T, M], float32."""
    return _dot(ct_TC.astype(w.dtype), w, 1, 0 if is_transposed else 1)


def of_w(x_TM: jax.Array, ct_TC: jax.Array, is_transposed: bool) -> jax.Array:
    """The gradient of a block of w: of its shape, float32."""
    ct_TC = ct_TC.astype(x_TM.dtype)
    return _dot(ct_TC, x_TM, 0, 0) if is_transposed else _dot(x_TM, ct_TC, 0, 0)


def _dot(a: jax.Array, b: jax.Array, dim_a: int, dim_b: int) -> jax.Array:
    dims = (((dim_a,), (dim_b,)), ((), ()))
    return jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)
