"""Attention with heads split in place of the sequence.

Two changes of what the axis splits: [length / n, heads] -> [length, heads / n] before attention, one all-to-all each
for queries, keys and values, and one back for the output; as many in the backward. A device gets every n-th group of
heads, so that an axis which splits heads already, such as a tensor axis, stays where it is.

The changes are annotations, not collectives in a `shard_map`: XLA gathers what other axes split before an all-to-all of
a body that is manual along some axes only.

Shape suffixes as in `block`, and N the length of the axis, with G / N groups on each device.

References: Jacobs et al., DeepSpeed Ulysses, 2023 (2309.14509), section 3.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from ..annotation import annotate
from . import block
from .order import positions
from .ring import Ring, seen

Kept = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]
"""What the backward needs, in groups: q, k, v, output, logarithm of the sum."""


def forward(over: Ring, q: jax.Array, k: jax.Array, v: jax.Array, *, is_manual: bool) -> tuple[jax.Array, Kept]:
    """The output [B, S, H, D], and what the backward needs.

    Args:
        over: the axis and the sequence; arrays are whole if its size is 1.
        q: queries [B, S, H, D].
        k: keys, [B, S, G, D].
        v: values, likewise.
        is_manual: whether arrays are a device's parts.
    """
    groups = math.lcm(k.shape[2], over.devices)
    in_groups = partial(_in_groups, over, groups=groups, is_manual=is_manual)
    q_BNGQSD = in_groups(q)
    k_BNGTD, v_BNGTD = (in_groups(_repeated(x, groups // k.shape[2]))[:, :, :, 0] for x in (k, v))

    @partial(jax.vmap, in_axes=1, out_axes=1)
    def attended(q_BGQSD: jax.Array, k_BGTD: jax.Array, v_BGTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        return block.result(block.add(block.nothing(q_BGQSD), q_BGQSD, k_BGTD, v_BGTD, _seen(over)))

    out_BNGQSD, logsumexp_BNGQS = attended(q_BNGQSD, k_BNGTD, v_BNGTD)
    out_BNGQSD = out_BNGQSD.astype(q.dtype)
    out = _in_positions(over, out_BNGQSD, is_manual=is_manual)
    return out, (q_BNGQSD, k_BNGTD, v_BNGTD, out_BNGQSD, logsumexp_BNGQS)


def backward(
    over: Ring, kept: Kept, dout: jax.Array, *, heads: int, is_manual: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of queries, keys and values.

    Args:
        over: as in `forward`.
        kept: by `forward`.
        dout: the gradient of the output [B, S, H, D].
        heads: of keys.
        is_manual: as in `forward`.
    """
    q_BNGQSD, k_BNGTD, v_BNGTD, out_BNGQSD, logsumexp_BNGQS = kept
    groups = math.lcm(heads, over.devices)
    dout_BNGQSD = _in_groups(over, dout, groups=groups, is_manual=is_manual)

    @partial(jax.vmap, in_axes=1, out_axes=1)
    def gradients(k_BGTD: jax.Array, v_BGTD: jax.Array, *of_queries: jax.Array) -> Any:
        return block.gradients(block.queries(*of_queries), k_BGTD, v_BGTD, _seen(over))

    dq, *others = gradients(k_BNGTD, v_BNGTD, q_BNGQSD, out_BNGQSD, dout_BNGQSD, logsumexp_BNGQS)
    in_positions = partial(_in_positions, over, is_manual=is_manual)
    dk, dv = (_summed(in_positions(dx.astype(dout.dtype)[:, :, :, None]), heads) for dx in others)
    return in_positions(dq.astype(dout.dtype)), dk, dv


def _repeated(k: jax.Array, repeats: int) -> jax.Array:
    """Each head of keys so often: the axis divides their number then."""
    return k if repeats == 1 else jnp.repeat(k, repeats, axis=2)


def _summed(dk: jax.Array, heads: int) -> jax.Array:
    """The gradient of heads from those of their copies."""
    return dk if dk.shape[2] == heads else dk.reshape(*dk.shape[:2], heads, -1, dk.shape[-1]).sum(axis=3)


def _in_groups(over: Ring, x: jax.Array, *, groups: int, is_manual: bool) -> jax.Array:
    """x_BNGQSD of [B, S, H, D]: whole sequences, and of the groups those that a device has."""
    each = groups // over.devices
    x_BSGNQD = x.reshape(*x.shape[:2], each, over.devices, x.shape[2] // groups, x.shape[3])
    x_BSGNQD = _exchanged(over, x_BSGNQD, 1, 3, is_manual=is_manual)
    return x_BSGNQD.transpose(0, 3, 2, 4, 1, 5)


def _in_positions(over: Ring, x_BNGQSD: jax.Array, *, is_manual: bool) -> jax.Array:
    """[B, S, H, D] of x_BNGQSD: a part of the sequence."""
    x_BSGNQD = _exchanged(over, x_BNGQSD.transpose(0, 4, 2, 1, 3, 5), 3, 1, is_manual=is_manual)
    return x_BSGNQD.reshape(*x_BSGNQD.shape[:2], -1, x_BSGNQD.shape[-1])


def _exchanged(over: Ring, x: jax.Array, before: int, after: int, *, is_manual: bool) -> jax.Array:
    """An array of which the axis splits another dim: one all-to-all."""
    if over.devices == 1:
        return x
    if is_manual:
        return lax.all_to_all(x, over.axis, split_axis=after, concat_axis=before, tiled=True)
    dims: list[Any] = [P.UNCONSTRAINED] * x.ndim
    dims[before], dims[after] = over.axis, None
    x = annotate(x, P(*dims))
    dims[before], dims[after] = None, over.axis
    return annotate(x, P(*dims))


def _seen(over: Ring) -> block.Seen:
    """[S, T], or None where all see all."""
    if not over.causal and over.length == over.padded:
        return None
    position = jnp.asarray(positions(over.padded, over.devices, over.order))
    return seen(position, position, causal=over.causal, length=over.length)
