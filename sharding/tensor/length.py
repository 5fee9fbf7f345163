"""A residual stream whose length is split too, between the branches (sequence parallelism of Megatron-LM).

Norms, dropout and sums are then computed once in all instead of once on each device of the axis, and what is saved of
them for the backward is split. A branch gathers what goes into it and scatters what comes out:

    x = x + tensor.scattered(branch(tensor.gathered(norm(x))))

So the all-reduce behind a branch is a reduce-scatter behind it and an all-gather before the next one; the same bytes.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ..annotation import annotate
from ..barrier import barrier
from ..errors import ShardingError
from .axis import U, check_divides


def scattered(x: jax.Array, *, axis: str = "tensor", length_axis: str | None = None, dim: int = -2) -> jax.Array:
    """`x` with its length split by an axis; a sum over the axis that makes it is a reduce-scatter.

    Its cotangent is gathered where the branch needs it.

    Args:
        x: [batch, length, features].
        axis: of the mesh, the one that splits the branches' weights.
        length_axis: another axis that splits the length already, in longer parts.
        dim: of the length.

    Raises:
        ShardingError: no mesh in force, no such axis; a length that the axes don't divide.

    References:
        Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models (2205.05198), section 4.2.2.
    """
    return _conjugate("scattered", x, axis, length_axis, dim)


def gathered(x: jax.Array, *, axis: str = "tensor", length_axis: str | None = None, dim: int = -2) -> jax.Array:
    """`x` with its length whole along an axis, as a branch needs it; its cotangent's sum is a reduce-scatter.

    Args and errors as in ``scattered``. Both have gradients of any order in reverse mode only.
    """
    return _conjugate("gathered", x, axis, length_axis, dim)


def _conjugate(what: str, x: jax.Array, axis: str, length_axis: str | None, dim: int) -> jax.Array:
    """Split forward and whole backward, or the other way round: the paper's operators g and g-bar."""
    asked = f"tensor.{what}(x, axis={axis!r})"
    if not -jnp.ndim(x) <= dim < jnp.ndim(x):
        raise ShardingError(asked, there=f"x of shape {jnp.shape(x)}, dim={dim}", must="dim is one of x")
    if length_axis == axis:
        raise ShardingError(asked, there=f"length_axis={axis!r}", must="the length is split by another axis already")
    check_divides(asked, (axis,) if length_axis is None else (length_axis, axis), x.shape[dim], "positions")
    split, whole = _spec(x.ndim, (length_axis, axis), dim), _spec(x.ndim, (length_axis,), dim)
    return _moved(split, whole, x) if what == "scattered" else _moved(whole, split, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _moved(spec: P, back: P, x: jax.Array) -> jax.Array:
    """`x` by a spec from here on, its cotangent by another one: an annotation alone has the same for both.

    What makes either is left as it is: the stream's split does not reach into a branch, nor what is whole out of it.
    """
    return annotate(barrier(x, "forward"), spec)


def _forward(spec: P, back: P, x: jax.Array) -> tuple[jax.Array, None]:
    return _moved(spec, back, x), None


def _backward(spec: P, back: P, _: None, cotangent: jax.Array) -> tuple[jax.Array]:
    return (_moved(back, spec, cotangent),)


_moved.defvjp(_forward, _backward)


def _spec(ndim: int, axes: tuple[str | None, ...], dim: int) -> P:
    """The length split by these axes, other dims open."""
    entries: list[Any] = [U] * ndim
    entries[dim] = tuple(name for name in axes if name is not None) or None
    return P(*entries)
