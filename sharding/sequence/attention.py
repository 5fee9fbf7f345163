"""Attention along a sharded sequence: argument checks, dispatch to ring or Ulysses, and the custom VJP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ..annotations.divergent_control_flow import divergent_axes
from ..errors import ShardingError, raise_together
from ..mesh import current
from ..spec import sizes_text
from . import attention_block, ring, ulysses
from .zigzag_order import ORDERS, Order

Kind = Literal["ring_self", "ring", "ulysses"]

KINDS: tuple[Kind, ...] = get_args(Kind)


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    axis: str = "seq",
    kind: Kind = "ring",
    causal: bool = True,
    order: Order = "plain",
) -> jax.Array:
    """Softmax attention along a sequence sharded over an axis, [batch, length, heads, head_dim]; softmax in float32.

    Shardings over other axes, such as of batch or heads, are kept. Works inside `sharding.jit`, `jax.jit` and
    `shard_map`, including one over `axis`, where arrays are local shards. Without a mesh, or with an axis of size 1, it
    is attention on one device.

    Args:
        q: queries [batch, length, heads, head_dim].
        k: keys; query heads must be a multiple of key heads (grouped-query attention).
        v: values, of the shape of `k`.
        axis: mesh axis; it need not divide the length.
        kind: ``ring``: keys and values rotate together, with an online softmax over one block of scores at a time:
            memory per device does not grow with the axis. ``ring_self``: keys rotate, then values; complete rows of
            scores. ``ulysses``: four all-to-alls reshard from the sequence to heads: the axis must divide the heads.
        causal: whether to mask later positions.
        order: order of the sequence in these arrays. In plain order a causal ring idles half of the device time: the
            first device computes one block and the last n. In ``zigzag`` order all compute the same number; the mask
            uses the original positions.

    Raises:
        ShardingError: mismatched shapes; no such kind, order or axis; indivisible heads; a sequence shorter than the
            axis; a ring in code that differs between devices, as in a pipeline compiled to one program.

    References:
        Li et al., Sequence Parallelism, 2021 (2105.13120), section 3.2 (``ring_self``; its gradient here is that of
        ``ring``, so no weights are saved); Liu et al., Ring Attention, 2023 (2310.01889), section 3; Jacobs et al.,
        DeepSpeed Ulysses, 2023 (2309.14509), section 3.
    """
    asked = f"sequence.attention(axis={axis!r}, kind={kind!r})"
    raise_together(asked, list(_shape_errors(asked, q, k, v)))
    devices, is_manual = _devices(asked, axis)
    length: int = q.shape[1] * (devices if is_manual else 1)
    raise_together(asked, list(_option_errors(asked, kind, order, devices, q.shape[2], length)))
    if kind != "ulysses" and devices > 1:
        _check_not_divergent(asked)
    chunk = devices if order == "plain" else 2 * devices
    padded = -(-length // chunk) * chunk
    ring_state = ring.Ring(axis=axis, devices=devices, causal=causal, order=order, length=length, padded=padded)
    config = _AttentionConfig(ring=ring_state, kind=kind, kv_heads=k.shape[2], is_manual=is_manual)
    if padded == length:
        return _attend(config, q, k, v)
    padding = [(0, 0), (0, padded - length), (0, 0), (0, 0)]
    out: jax.Array = _attend(config, jnp.pad(q, padding), jnp.pad(k, padding), jnp.pad(v, padding))
    return out[:, :length]


@dataclass(frozen=True, kw_only=True)
class _AttentionConfig:
    """Static arguments of the custom VJP."""

    ring: ring.Ring
    kind: Kind
    kv_heads: int
    is_manual: bool
    """Whether the axis is manual, so that arrays are local shards already."""

    def shard_map(self, body: Callable[..., Any], in_dims: Any, out_dims: Any) -> Callable[..., Any]:
        """`body` of local shards as a function of global arrays, each with the given dim sharded over the axis."""
        if self.is_manual or self.ring.devices == 1:
            return body
        spec = partial(jax.tree.map, lambda dim: P(*[None] * dim, self.ring.axis))
        # shard_map over a subset of the axes works under a trace only.
        return jax.jit(
            jax.shard_map(
                body, in_specs=spec(in_dims), out_specs=spec(out_dims), axis_names={self.ring.axis}, check_vma=False
            )
        )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(config: _AttentionConfig, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return _forward(config, q, k, v)[0]


def _forward(config: _AttentionConfig, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
    if config.kind == "ulysses" or config.ring.devices == 1:
        return jax.jit(partial(ulysses.forward, config.ring, is_manual=config.is_manual))(q, k, v)

    def body(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        forward_fn = ring.ring_attention if config.kind == "ring" else ring.ring_self_attention
        q_BGQSD, k_BGTD, v_BGTD = attention_block.group_heads(q, k, v)
        out_BGQSD, logsumexp_BGQS = forward_fn(config.ring, q_BGQSD, k_BGTD, v_BGTD)
        return attention_block.ungroup_heads(out_BGQSD.astype(q.dtype)), logsumexp_BGQS

    out, logsumexp_BGQS = config.shard_map(body, (1, 1, 1), (1, 3))(q, k, v)
    return out, (q, k, v, out, logsumexp_BGQS)


def _backward(config: _AttentionConfig, residuals: Any, dout: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    if config.kind == "ulysses" or config.ring.devices == 1:
        backward = partial(ulysses.backward, config.ring, heads=config.kv_heads, is_manual=config.is_manual)
        return jax.jit(backward)(residuals, dout)

    def body(
        q: jax.Array, k: jax.Array, v: jax.Array, out: jax.Array, logsumexp_BGQS: jax.Array, dout: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        q_BGQSD, k_BGTD, v_BGTD = attention_block.group_heads(q, k, v)
        queries = attention_block.query_residuals(
            q_BGQSD, attention_block.group_like(out, k), attention_block.group_like(dout, k), logsumexp_BGQS
        )
        dq_BGQSD, dk_BGTD, dv_BGTD = ring.gradients(config.ring, queries, k_BGTD, v_BGTD)
        dk, dv = dk_BGTD.swapaxes(1, 2), dv_BGTD.swapaxes(1, 2)
        return attention_block.ungroup_heads(dq_BGQSD).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)

    return config.shard_map(body, (1, 1, 1, 1, 3, 1), (1, 1, 1))(*residuals, dout)


_attend.defvjp(_forward, _backward)


def _devices(asked: str, axis: str) -> tuple[int, bool]:
    """Axis size (1 without a mesh), and whether the axis is manual."""
    mesh = current()
    if mesh is None:
        return 1, False
    sizes = dict(mesh.shape)
    if axis not in sizes:
        raise ShardingError(
            asked,
            found=f"mesh axes {sizes_text(sizes)}",
            required=f"a mesh axis {axis!r}",
            fix=[f"sharding.mesh(..., {axis}=...)", *(f"axis={name!r}" for name in sizes)],
        )
    return sizes[axis], axis in jax.sharding.get_abstract_mesh().manual_axes


def _shape_errors(asked: str, q: jax.Array, k: jax.Array, v: jax.Array) -> Iterator[ShardingError]:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    dims = "[batch, length, heads, head_dim]"
    if not q.ndim == k.ndim == v.ndim == 4:
        yield ShardingError(asked, found=shapes, required=f"each {dims}")
        return
    if k.shape != v.shape:
        yield ShardingError(asked, found=shapes, required="keys and values of one shape")
    if [q.shape[d] for d in (0, 1, 3)] != [k.shape[d] for d in (0, 1, 3)]:
        yield ShardingError(asked, found=shapes, required=f"queries and keys {dims} that differ only in heads")
    if min(*q.shape, k.shape[2]) < 1 or q.shape[2] % k.shape[2]:
        yield ShardingError(
            asked,
            found=f"{shapes}: {q.shape[2]} query heads, {k.shape[2]} key heads",
            required="query heads that are a multiple of key heads",
        )


def _option_errors(asked: str, kind: str, order: str, devices: int, heads: int, length: int) -> Iterator[ShardingError]:
    for name, value, known in (("kind", kind, KINDS), ("order", order, ORDERS)):
        if value not in known:
            required = f"one of {', '.join(map(repr, known))}"
            yield ShardingError(f"{asked}: {name}", found=repr(value), required=required, fix=f"{name}={known[-1]!r}")
    if kind == "ulysses" and heads % devices:
        yield ShardingError(
            asked,
            found=f"{heads} heads over {devices} devices: {heads} / {devices} = {heads / devices:g}",
            required=f"a multiple of {devices} heads",
            fix=["kind='ring', for any number of heads", "an axis size that divides the heads"],
        )
    if length < devices:
        yield ShardingError(
            asked,
            found=f"{length} positions over {devices} devices",
            required=f"at least {devices} positions",
            fix="a smaller axis",
        )
    if order == "zigzag" and length % (2 * devices):
        yield ShardingError(
            f"{asked}: order='zigzag'",
            found=f"{length} positions, 2 x {devices} chunks",
            required=f"a multiple of {2 * devices} positions",
            fix=["order='plain', for any length", f"pad to {-(-length // (2 * devices)) * 2 * devices}"],
        )


def _check_not_divergent(asked: str) -> None:
    divergent = divergent_axes()
    if divergent:
        raise ShardingError(
            asked,
            found=f"a task that devices along {', '.join(map(repr, divergent))} run at different times",
            required="all devices of the mesh in every step of a ring; otherwise it deadlocks",
            fix=["kind='ulysses'", "executor='mpmd' for the pipeline"],
        )
