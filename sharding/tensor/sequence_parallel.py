"""Sequence parallelism (Megatron-LM): a residual stream with its length sharded between the branches.

Norms, dropout and residual sums are computed on shards of the sequence instead of repeated on each device of the axis,
and their residuals for the backward pass are sharded. A branch all-gathers its input and reduce-scatters its output:

    x = x + tensor.scattered(branch(tensor.gathered(norm(x))))

The all-reduce after a branch becomes a reduce-scatter after it and an all-gather before the next: the same bytes.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ..annotations.annotate import annotate
from ..annotations.propagation_barrier import barrier
from ..errors import ShardingError
from .tensor_axis import U, check_divides


def scattered(x: jax.Array, *, axis: str = "tensor", length_axis: str | None = None, dim: int = -2) -> jax.Array:
    """`x` with its length sharded over an axis; a pending sum over the axis becomes a reduce-scatter.

    Its cotangent is all-gathered.

    Args:
        x: [batch, length, features].
        axis: mesh axis, the one that the branches' weights are sharded over.
        length_axis: another axis that already shards the length, major to `axis`.
        dim: the length dim.

    Raises:
        ShardingError: no mesh in context, no such axis, or an indivisible length.

    References:
        Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models (2205.05198), section 4.2.2.
    """
    return _conjugate("scattered", x, axis, length_axis, dim)


def gathered(x: jax.Array, *, axis: str = "tensor", length_axis: str | None = None, dim: int = -2) -> jax.Array:
    """`x` with its length all-gathered over an axis, as a branch needs it; its cotangent is reduce-scattered.

    Arguments and errors as in ``scattered``. Both support reverse mode only, to any order.
    """
    return _conjugate("gathered", x, axis, length_axis, dim)


def _conjugate(name: str, x: jax.Array, axis: str, length_axis: str | None, dim: int) -> jax.Array:
    """Sharded forward and replicated backward, or the reverse: the paper's operators g and g-bar."""
    asked = f"tensor.{name}(x, axis={axis!r})"
    if not -jnp.ndim(x) <= dim < jnp.ndim(x):
        raise ShardingError(asked, found=f"x of shape {jnp.shape(x)}, dim={dim}", required="a dim of x")
    if length_axis == axis:
        raise ShardingError(asked, found=f"length_axis={axis!r}", required="a length_axis other than axis")
    check_divides(asked, (axis,) if length_axis is None else (length_axis, axis), x.shape[dim], "positions")
    sharded, replicated = _spec(x.ndim, (length_axis, axis), dim), _spec(x.ndim, (length_axis,), dim)
    return _reshard(sharded, replicated, x) if name == "scattered" else _reshard(replicated, sharded, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _reshard(spec: P, cotangent_spec: P, x: jax.Array) -> jax.Array:
    """`x` resharded to one spec and its cotangent to another; an annotation alone applies one spec to both.

    The barrier stops backward propagation: the stream's sharding does not reach into a branch, nor the reverse.
    """
    return annotate(barrier(x, "forward"), spec)


def _forward(spec: P, cotangent_spec: P, x: jax.Array) -> tuple[jax.Array, None]:
    return _reshard(spec, cotangent_spec, x), None


def _backward(spec: P, cotangent_spec: P, _: None, cotangent: jax.Array) -> tuple[jax.Array]:
    return (_reshard(cotangent_spec, spec, cotangent),)


_reshard.defvjp(_forward, _backward)


def _spec(ndim: int, axes: tuple[str | None, ...], dim: int) -> P:
    """The length sharded over these axes, other dims unconstrained."""
    entries: list[Any] = [U] * ndim
    entries[dim] = tuple(name for name in axes if name is not None) or None
    return P(*entries)
