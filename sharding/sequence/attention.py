"""One call for attention along a sequence that an axis of the mesh splits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ..divergence import differs
from ..errors import ShardingError, raise_together
from ..mesh import current
from ..spec import sizes_text
from . import block, ring, ulysses
from .order import ORDERS, Order

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
    """Softmax attention along a sequence that an axis splits, [batch, length, heads, head_dim]; softmax in float32.

    What other axes split, such as the batch or heads, stays as it is. Works inside `sharding.jit` and `jax.jit`, and in
    a `shard_map`, also one over `axis`, where arrays are a device's parts. Without a mesh, or with an axis of size 1,
    it is attention on one device.

    Args:
        q: queries [batch, length, heads, head_dim].
        k: keys; fewer heads than of queries, which share them evenly, if any number divides.
        v: values, of the shape of `k`.
        axis: of the mesh; the length need not be a multiple of it.
        kind: ``ring``: keys and values go around, with a softmax that needs one block of scores at a time: memory of a
            device does not grow with the axis. ``ring_self``: keys go around, then values; whole rows of scores.
            ``ulysses``: four all-to-alls, by which the axis splits heads in place of the sequence: heads must divide.
        causal: whether a position sees itself and those before it only, or all.
        order: of the sequence in these arrays. In plain order a causal ring leaves half of the devices' time unused:
            the first has one block to compute and the last n. In the order of ``zigzag`` all have the same; positions
            count as they do in plain order.

    Raises:
        ShardingError: shapes that don't fit; no such kind, order or axis; heads that don't divide; a sequence shorter
            than the axis; a ring where devices around do different things, as in a pipeline that is one program.

    References:
        Li et al., Sequence Parallelism, 2021 (2105.13120), section 3.2 (``ring_self``, whose gradient here is that of
        ``ring``: no weights are kept); Liu et al., Ring Attention, 2023 (2310.01889), section 3; Jacobs et al.,
        DeepSpeed Ulysses, 2023 (2309.14509), section 3.
    """
    asked = f"sequence.attention(axis={axis!r}, kind={kind!r})"
    raise_together(asked, list(_misshapen(asked, q, k, v)))
    devices, is_manual = _devices(asked, axis)
    length: int = q.shape[1] * (devices if is_manual else 1)
    raise_together(asked, list(_misfits(asked, kind, order, devices, q.shape[2], length)))
    if kind != "ulysses" and devices > 1:
        _check_together(asked)
    chunk = devices if order == "plain" else 2 * devices
    padded = -(-length // chunk) * chunk
    around = ring.Ring(axis=axis, devices=devices, causal=causal, order=order, length=length, padded=padded)
    how = _How(ring=around, kind=kind, kv_heads=k.shape[2], is_manual=is_manual)
    if padded == length:
        return _attend(how, q, k, v)
    room = [(0, 0), (0, padded - length), (0, 0), (0, 0)]
    out: jax.Array = _attend(how, jnp.pad(q, room), jnp.pad(k, room), jnp.pad(v, room))
    return out[:, :length]


@dataclass(frozen=True, kw_only=True)
class _How:
    """What was asked for, and where."""

    ring: ring.Ring
    kind: Kind
    kv_heads: int
    is_manual: bool
    """Whether arrays are a device's parts already."""

    def on_each(self, body: Callable[..., Any], in_dims: Any, out_dims: Any) -> Callable[..., Any]:
        """A function of each device's parts, as one of whole arrays, of each of which the axis splits a dim."""
        if self.is_manual or self.ring.devices == 1:
            return body
        spec = partial(jax.tree.map, lambda dim: P(*[None] * dim, self.ring.axis))
        # Partly manual bodies run in a trace only.
        return jax.jit(
            jax.shard_map(
                body, in_specs=spec(in_dims), out_specs=spec(out_dims), axis_names={self.ring.axis}, check_vma=False
            )
        )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(how: _How, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return _forward(how, q, k, v)[0]


def _forward(how: _How, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
    if how.kind == "ulysses" or how.ring.devices == 1:
        return jax.jit(partial(ulysses.forward, how.ring, is_manual=how.is_manual))(q, k, v)

    def body(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        rotated = ring.online if how.kind == "ring" else ring.whole_rows
        q_BGQSD, k_BGTD, v_BGTD = block.by_group(q, k, v)
        out_BGQSD, logsumexp_BGQS = rotated(how.ring, q_BGQSD, k_BGTD, v_BGTD)
        return block.by_position(out_BGQSD.astype(q.dtype)), logsumexp_BGQS

    out, logsumexp_BGQS = how.on_each(body, (1, 1, 1), (1, 3))(q, k, v)
    return out, (q, k, v, out, logsumexp_BGQS)


def _backward(how: _How, kept: Any, dout: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    if how.kind == "ulysses" or how.ring.devices == 1:
        backward = partial(ulysses.backward, how.ring, heads=how.kv_heads, is_manual=how.is_manual)
        return jax.jit(backward)(kept, dout)

    def body(
        q: jax.Array, k: jax.Array, v: jax.Array, out: jax.Array, logsumexp_BGQS: jax.Array, dout: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        q_BGQSD, k_BGTD, v_BGTD = block.by_group(q, k, v)
        queries = block.queries(q_BGQSD, block.like_queries(out, k), block.like_queries(dout, k), logsumexp_BGQS)
        dq_BGQSD, dk_BGTD, dv_BGTD = ring.gradients(how.ring, queries, k_BGTD, v_BGTD)
        dk, dv = dk_BGTD.swapaxes(1, 2), dv_BGTD.swapaxes(1, 2)
        return block.by_position(dq_BGQSD).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)

    return how.on_each(body, (1, 1, 1, 1, 3, 1), (1, 1, 1))(*kept, dout)


_attend.defvjp(_forward, _backward)


def _devices(asked: str, axis: str) -> tuple[int, bool]:
    """How many devices the axis has, 1 without a mesh, and whether arrays are a device's parts."""
    mesh = current()
    if mesh is None:
        return 1, False
    sizes = dict(mesh.shape)
    if axis not in sizes:
        raise ShardingError(
            asked,
            there=f"mesh axes {sizes_text(sizes)}",
            must="the axis is one of the mesh",
            fix=[f"sharding.mesh(..., {axis}=...)", *(f"axis={name!r}" for name in sizes)],
        )
    return sizes[axis], axis in jax.sharding.get_abstract_mesh().manual_axes


def _misshapen(asked: str, q: jax.Array, k: jax.Array, v: jax.Array) -> Iterator[ShardingError]:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    dims = "[batch, length, heads, head_dim]"
    if not q.ndim == k.ndim == v.ndim == 4:
        yield ShardingError(asked, there=shapes, must=f"each is {dims}")
        return
    if k.shape != v.shape:
        yield ShardingError(asked, there=shapes, must="keys and values have one shape")
    if [q.shape[d] for d in (0, 1, 3)] != [k.shape[d] for d in (0, 1, 3)]:
        yield ShardingError(asked, there=shapes, must=f"queries and keys, {dims}, differ at most in heads")
    if min(q.shape) < 1 or q.shape[2] % k.shape[2]:
        yield ShardingError(
            asked,
            there=f"{shapes}: {q.shape[2]} heads of queries, {k.shape[2]} of keys",
            must="each head of keys serves as many of queries",
        )


def _misfits(asked: str, kind: str, order: str, devices: int, heads: int, length: int) -> Iterator[ShardingError]:
    for name, value, known in (("kind", kind, KINDS), ("order", order, ORDERS)):
        if value not in known:
            must = f"one of {', '.join(map(repr, known))}"
            yield ShardingError(f"{asked}: {name}", there=repr(value), must=must, fix=f"{name}={known[-1]!r}")
    if kind == "ulysses" and heads % devices:
        yield ShardingError(
            asked,
            there=f"{heads} heads over {devices} devices: {heads} / {devices} = {heads / devices:g}",
            must="each device gets as many heads",
            fix=["kind='ring', which any number of heads fits", "an axis that divides them"],
        )
    if length < devices:
        yield ShardingError(
            asked,
            there=f"{length} positions over {devices} devices",
            must="the sequence is at least as long as the axis",
            fix="a shorter axis",
        )
    if order == "zigzag" and length % (2 * devices):
        yield ShardingError(
            f"{asked}: order='zigzag'",
            there=f"{length} positions, 2 x {devices} chunks",
            must="chunks of one length",
            fix=["order='plain', for any length", f"pad to {-(-length // (2 * devices)) * 2 * devices}"],
        )


def _check_together(asked: str) -> None:
    apart = differs()
    if apart:
        raise ShardingError(
            asked,
            there=f"a task that devices along {', '.join(map(repr, apart))} run at different times",
            must="all devices of the mesh take part in each step of a ring, or some wait for ever",
            fix=["kind='ulysses'", "executor='mpmd' for the pipeline"],
        )
