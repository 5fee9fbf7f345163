"""Ulysses attention: all-to-alls reshard from the sequence to heads and back.

[length / n, heads] -> [length, heads / n] before attention, one all-to-all each for queries, keys and values, and one
back for the output; as many in the backward pass. A device gets every n-th group of heads, so that an existing sharding
of heads, such as over a tensor axis, is kept.

The reshards are annotations, not collectives in a `shard_map`: in a body that is manual over some axes only, XLA
all-gathers over the other axes before an all-to-all.

Shape suffixes as in `attention_block`, and N the size of the axis, with G / N groups per device.

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

from ..annotations.annotate import annotate
from . import attention_block
from .ring import Ring, mask
from .zigzag_order import positions

Residuals = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]
"""Residuals for the backward pass, sharded over heads: q, k, v, output, logsumexp."""


def forward(ring: Ring, q: jax.Array, k: jax.Array, v: jax.Array, *, is_manual: bool) -> tuple[jax.Array, Residuals]:
    """The output [B, S, H, D], and the residuals for the backward pass.

    Args:
        ring: the axis and the sequence; its size may be 1.
        q: queries [B, S, H, D].
        k: keys [B, S, G, D].
        v: values [B, S, G, D].
        is_manual: whether arrays are local shards.
    """
    groups = math.lcm(k.shape[2], ring.devices)
    to_heads = partial(_to_heads, ring, groups=groups, is_manual=is_manual)
    q_BNGQSD = to_heads(q)
    k_BNGTD, v_BNGTD = (to_heads(_repeat_heads(x, groups // k.shape[2]))[:, :, :, 0] for x in (k, v))

    @partial(jax.vmap, in_axes=1, out_axes=1)
    def attended(q_BGQSD: jax.Array, k_BGTD: jax.Array, v_BGTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        return attention_block.finalize(
            attention_block.update(attention_block.empty_state(q_BGQSD), q_BGQSD, k_BGTD, v_BGTD, _mask(ring))
        )

    out_BNGQSD, logsumexp_BNGQS = attended(q_BNGQSD, k_BNGTD, v_BNGTD)
    out_BNGQSD = out_BNGQSD.astype(q.dtype)
    out = _to_sequence(ring, out_BNGQSD, is_manual=is_manual)
    return out, (q_BNGQSD, k_BNGTD, v_BNGTD, out_BNGQSD, logsumexp_BNGQS)


def backward(
    ring: Ring, residuals: Residuals, dout: jax.Array, *, heads: int, is_manual: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of queries, keys and values.

    Args:
        ring: as in `forward`.
        residuals: as returned by `forward`.
        dout: gradient of the output [B, S, H, D].
        heads: number of key heads.
        is_manual: as in `forward`.
    """
    q_BNGQSD, k_BNGTD, v_BNGTD, out_BNGQSD, logsumexp_BNGQS = residuals
    groups = math.lcm(heads, ring.devices)
    dout_BNGQSD = _to_heads(ring, dout, groups=groups, is_manual=is_manual)

    @partial(jax.vmap, in_axes=1, out_axes=1)
    def gradients(k_BGTD: jax.Array, v_BGTD: jax.Array, *per_query: jax.Array) -> Any:
        return attention_block.gradients(attention_block.query_residuals(*per_query), k_BGTD, v_BGTD, _mask(ring))

    dq, *others = gradients(k_BNGTD, v_BNGTD, q_BNGQSD, out_BNGQSD, dout_BNGQSD, logsumexp_BNGQS)
    to_sequence = partial(_to_sequence, ring, is_manual=is_manual)
    dk, dv = (_sum_copies(to_sequence(dx.astype(dout.dtype)[:, :, :, None]), heads) for dx in others)
    return to_sequence(dq.astype(dout.dtype)), dk, dv


def _repeat_heads(k: jax.Array, repeats: int) -> jax.Array:
    """Key heads repeated, so that the axis divides their number."""
    return k if repeats == 1 else jnp.repeat(k, repeats, axis=2)


def _sum_copies(dk: jax.Array, heads: int) -> jax.Array:
    """The gradient of heads, summed over their copies."""
    return dk if dk.shape[2] == heads else dk.reshape(*dk.shape[:2], heads, -1, dk.shape[-1]).sum(axis=3)


def _to_heads(ring: Ring, x: jax.Array, *, groups: int, is_manual: bool) -> jax.Array:
    """[B, S, H, D] sharded over the sequence -> x_BNGQSD sharded over groups of heads."""
    each = groups // ring.devices
    x_BSGNQD = x.reshape(*x.shape[:2], each, ring.devices, x.shape[2] // groups, x.shape[3])
    x_BSGNQD = _all_to_all(ring, x_BSGNQD, 1, 3, is_manual=is_manual)
    return x_BSGNQD.transpose(0, 3, 2, 4, 1, 5)


def _to_sequence(ring: Ring, x_BNGQSD: jax.Array, *, is_manual: bool) -> jax.Array:
    """x_BNGQSD sharded over groups of heads -> [B, S, H, D] sharded over the sequence."""
    x_BSGNQD = _all_to_all(ring, x_BNGQSD.transpose(0, 4, 2, 1, 3, 5), 3, 1, is_manual=is_manual)
    return x_BSGNQD.reshape(*x_BSGNQD.shape[:2], -1, x_BSGNQD.shape[-1])


def _all_to_all(ring: Ring, x: jax.Array, before: int, after: int, *, is_manual: bool) -> jax.Array:
    """`x` resharded from dim `before` to dim `after`: one all-to-all."""
    if ring.devices == 1:
        return x
    if is_manual:
        return lax.all_to_all(x, ring.axis, split_axis=after, concat_axis=before, tiled=True)
    dims: list[Any] = [P.UNCONSTRAINED] * x.ndim
    dims[before], dims[after] = ring.axis, None
    x = annotate(x, P(*dims))
    dims[before], dims[after] = None, ring.axis
    return annotate(x, P(*dims))


def _mask(ring: Ring) -> attention_block.Mask:
    """The attention mask [S, T], or None without masking."""
    if not ring.causal and ring.length == ring.padded:
        return None
    position = jnp.asarray(positions(ring.padded, ring.devices, ring.order))
    return mask(position, position, causal=ring.causal, length=ring.length)
