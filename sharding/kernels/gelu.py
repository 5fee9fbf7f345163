"""GELU alone: between two matmuls, which a compiler can make it part of, or not."""

from __future__ import annotations

import jax

from .bias_gelu_dropout import APPROXIMATE_GELU, fused, obstacle
from .implementation import XLA, Candidate, choose

IMPLEMENTATIONS = (
    Candidate(
        name="mosaic_gpu",
        platforms=frozenset({"gpu"}),
        obstacle=lambda x: obstacle("mosaic_gpu", x, None),
        why="keeps its input only; the compiler keeps its slope, too",
    ),
    Candidate(
        name="mosaic_tpu",
        platforms=frozenset(),
        obstacle=lambda x: obstacle("mosaic_tpu", x, None),
        why="one pass over memory; the compiler makes it part of a matmul",
    ),
)


def gelu(x: jax.Array, *, implementation: str = "auto") -> jax.Array:
    """GELU by tanh, as `jax.nn.gelu(x)`; in float32 where a kernel runs it.

    Args:
        x: [..., F], of a floating-point dtype.
        implementation: `"mosaic_gpu"`, `"mosaic_tpu"`, `"xla"`, or `"auto"`: the kernel on GPUs, else `jax.nn.gelu`.

    Raises:
        ShardingError: the implementation is unknown or can't take this array.

    Example:
        >>> import jax.numpy as jnp
        >>> from sharding import kernels
        >>> kernels.gelu(jnp.array([0.0, 100.0]))
        Array([  0., 100.], dtype=float32)
    """
    chosen = choose("gelu", IMPLEMENTATIONS, implementation, x)
    return jax.nn.gelu(x) if chosen == XLA else fused(x, None, None, 0.0, APPROXIMATE_GELU, chosen)
