"""Softmax of scaled and masked scores in one pass, with a backward pass that reads the result only.

As in DeepSpeed's transformer kernel: the scores are not kept, as dS = scale * Y (dY - sum(dY Y)). Scale and mask are
Megatron-LM's fused softmax (Shoeybi et al., arXiv:1909.08053).

Shape suffixes: S scores of a row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..errors import ShardingError
from . import row_kernel
from .implementation import ONE_PASS, XLA, Backend, Candidate, backend, choose
from .row_kernel import Along, RowKernel
from .saved_names import saved
from .with_rule import with_rule

IMPLEMENTATIONS = (
    Candidate(
        name="mosaic_tpu", platforms=frozenset({"tpu"}), obstacle=lambda s, *_: obstacle("mosaic_tpu", s), why=ONE_PASS
    ),
    Candidate(
        name="mosaic_gpu", platforms=frozenset({"gpu"}), obstacle=lambda s, *_: obstacle("mosaic_gpu", s), why=ONE_PASS
    ),
)

LOW = float(jnp.finfo(jnp.float32).min)
"""A score that is masked."""


def scaled_softmax(
    scores: jax.Array, mask: jax.Array | None = None, *, scale: float = 1.0, implementation: str = "auto"
) -> jax.Array:
    """`softmax(scale * scores)` over the last dim, in float32, of the scores that a mask leaves.

    Args:
        scores: [..., S], of a floating-point dtype.
        mask: booleans of the shape of the scores; where it is false, the result is 0. A row without any is 0.
        scale: of the scores.
        implementation: `"mosaic_tpu"`, `"mosaic_gpu"`, `"xla"`, or `"auto"`: the kernel of the current mesh's platform.

    Returns:
        [..., S], in the dtype of the scores.

    Raises:
        ShardingError: a mask of another shape or dtype; the implementation is unknown or can't take these arrays.

    Example:
        >>> import jax.numpy as jnp
        >>> from sharding import kernels
        >>> kernels.scaled_softmax(jnp.zeros(4), jnp.array([True, True, False, False]))
        Array([0.5, 0.5, 0. , 0. ], dtype=float32)
    """
    if mask is not None and (mask.shape != scores.shape or mask.dtype != jnp.bool_):
        raise ShardingError(
            "kernels.scaled_softmax(scores, mask)",
            found=f"scores {scores.dtype}{list(scores.shape)}, mask {mask.dtype}{list(mask.shape)}",
            required="a boolean mask of the shape of the scores",
            fix="jnp.broadcast_to(mask, scores.shape)",
        )
    chosen = choose("scaled_softmax", IMPLEMENTATIONS, implementation, scores)
    if chosen == XLA:
        return saved(reference(scores, mask, scale), "softmax_output")
    # A byte per score; a masked one is below all others, whatever the score.
    return _softmax(scores, mask if mask is None else mask.astype(jnp.int8), scale, chosen)


def reference(scores: jax.Array, mask: jax.Array | None = None, scale: float = 1.0) -> jax.Array:
    """The same in plain JAX."""
    wide = scores.astype(jnp.float32) * scale
    if mask is not None:
        wide = jnp.where(mask, wide, LOW)
    weights = jnp.exp(wide - jax.lax.stop_gradient(jnp.max(wide, axis=-1, keepdims=True)))
    if mask is not None:
        weights = jnp.where(mask, weights, 0.0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return (weights / jnp.where(total > 0, total, 1.0)).astype(scores.dtype)


def obstacle(implementation: str, scores: Any) -> str:
    """Why a kernel can't run, or an empty text."""
    return row_kernel.obstacle(implementation, [scores])


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _softmax(scores: jax.Array, mask: jax.Array | None, scale: float, implementation: str) -> jax.Array:
    arrays = [scores] if mask is None else [scores, mask]
    return _on_shards(scale, mask is not None, backend(implementation))(*arrays)


@functools.cache
def _on_shards(scale: float, has_mask: bool, compiler: Backend) -> Callable[..., Any]:
    def scaled_softmax(*arrays: jax.Array) -> jax.Array:
        like = jax.ShapeDtypeStruct(arrays[0].shape, arrays[0].dtype)
        return _forward(scale, has_mask)(arrays, [], [like], [], compiler)[0]

    operands = "... s, ... s" if has_mask else "... s"
    return with_rule(scaled_softmax, f"{operands} -> ... s", need_replication=["s"])


def _keep(scores: jax.Array, mask: jax.Array | None, scale: float, implementation: str) -> Any:
    found: jax.Array = saved(_softmax(scores, mask, scale, implementation), "softmax_output")
    return found, found


def _gradients(scale: float, implementation: str, weights: jax.Array, ct: jax.Array) -> Any:
    return _gradients_on_shards(scale, backend(implementation))(weights, ct), None


@functools.cache
def _gradients_on_shards(scale: float, compiler: Backend) -> Callable[..., Any]:
    def scaled_softmax_gradients(weights: jax.Array, ct: jax.Array) -> jax.Array:
        like = jax.ShapeDtypeStruct(ct.shape, ct.dtype)
        return _backward(scale)([weights, ct], [], [like], [], compiler)[0]

    return with_rule(scaled_softmax_gradients, "... s, ... s -> ... s", need_replication=["s"])


_softmax.defvjp(_keep, _gradients)


@functools.cache
def _forward(scale: float, has_mask: bool) -> RowKernel:
    def body(rows: Sequence[jax.Array], vectors: Sequence[jax.Array], along: Along) -> Any:
        del vectors
        wide = rows[0] * scale
        if has_mask:
            wide = jnp.where(rows[1] != 0, wide, LOW)
        weights = jnp.exp(wide - along.max(wide))
        if has_mask:
            weights = jnp.where(rows[1] != 0, weights, 0.0)
        sum_ = along.sum(weights)
        return [weights / jnp.where(sum_ > 0, sum_, 1.0)], []

    return RowKernel(name="scaled_softmax", body=body, flops_per_element=6, transcendentals_per_element=1)


@functools.cache
def _backward(scale: float) -> RowKernel:
    def body(rows: Sequence[jax.Array], vectors: Sequence[jax.Array], along: Along) -> Any:
        del vectors
        weights, ct = rows
        return [scale * weights * (ct - along.sum(weights * ct))], []

    return RowKernel(name="scaled_softmax_gradients", body=body, flops_per_element=5)
