"""Collective matmul: an all-gather or reduce-scatter that is computed on while it is sent.

A device multiplies one shard while the next is on its way: `x_1 @ w` needs only the first shard of `x`, and a
reduce-scatter needs only one shard of the product from each device at a time. Shards travel around the ring of the axis
in both directions at once, so that both directions of the links are used. As many bytes are sent as by the collective.
Compilers overlap the `ppermute`s with the products, as neither waits for the other (Wang et al., Overlap Communication
with Dependent Computation via Decomposition in Large Deep Learning Models, ASPLOS 2023).

Shape suffixes: T rows of a shard, K contracted features, N features of the result, P devices of the axis.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from ..errors import ShardingError
from .implementation import XLA, Candidate, choose

IMPLEMENTATIONS = (
    Candidate(
        name="ring",
        platforms=frozenset({"tpu", "gpu"}),
        obstacle=lambda *_: "",
        why="shards travel while others are multiplied",
    ),
)


def all_gather_matmul(
    x_TK: jax.Array, w_KN: jax.Array, *, axis: str, dim: int = -2, implementation: str = "auto"
) -> jax.Array:
    """`all_gather(x, axis) @ w`, in a `shard_map` over the axis.

    Args:
        x_TK: [..., T, K], a shard of the rows.
        w_KN: [K, N].
        axis: the manual mesh axis that the rows are sharded over.
        dim: the dim of the rows.
        implementation: `"ring"`; `"xla"`, a collective and a matmul; `"auto"`, the ring on TPUs and GPUs.

    Returns:
        [..., P T, N], of all rows, in the order of the devices.

    Raises:
        ShardingError: unknown implementation, shapes that don't fit, or no manual axis of that name.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import sharding
        >>> from sharding import P, kernels
        >>> with sharding.mesh(tensor=8):
        ...     f = jax.shard_map(
        ...         lambda x, w: kernels.all_gather_matmul(x, w, axis="tensor", implementation="ring"),
        ...         in_specs=(P("tensor"), P(None, "tensor")), out_specs=P(None, "tensor"),
        ...     )
        ...     y = jax.jit(f)(jnp.ones((16, 4)), jnp.ones((4, 8)))
        >>> y.shape, y.sharding.spec
        ((16, 8), P(None, 'tensor'))
    """
    dim, chosen = _checked("all_gather_matmul", x_TK, w_KN, axis, dim, implementation)
    if chosen == XLA:
        return _product(jax.lax.all_gather(x_TK, axis, axis=dim, tiled=True), w_KN)
    return _all_gather_matmul(x_TK, w_KN, axis, dim)


def matmul_reduce_scatter(
    x_TK: jax.Array, w_KN: jax.Array, *, axis: str, dim: int = -2, implementation: str = "auto"
) -> jax.Array:
    """`psum_scatter(x @ w, axis)`, in a `shard_map` over the axis.

    Args:
        x_TK: [..., P T, K], all rows and a shard of the contracted features.
        w_KN: [K, N].
        axis: the manual mesh axis that the contracted features are sharded over.
        dim: the dim of the rows.
        implementation: as in `all_gather_matmul`.

    Returns:
        [..., T, N], this device's rows of the sum.

    Raises:
        ShardingError: as `all_gather_matmul`, or rows that the devices don't divide.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import sharding
        >>> from sharding import P, kernels
        >>> with sharding.mesh(tensor=8):
        ...     f = jax.shard_map(
        ...         lambda x, w: kernels.matmul_reduce_scatter(x, w, axis="tensor", implementation="ring"),
        ...         in_specs=(P(None, "tensor"), P("tensor")), out_specs=P("tensor"),
        ...     )
        ...     y = jax.jit(f)(jnp.ones((16, 8)), jnp.ones((8, 4)))
        >>> y.shape, y.sharding.spec
        ((16, 4), P('tensor',))
    """
    dim, chosen = _checked("matmul_reduce_scatter", x_TK, w_KN, axis, dim, implementation)
    if x_TK.shape[dim] % (n := jax.lax.axis_size(axis)):
        raise ShardingError(
            f"kernels.matmul_reduce_scatter(x, w, axis={axis!r})",
            found=f"x of shape {x_TK.shape}, {n} devices",
            required=f"dim {dim} of x to be a multiple of {n}",
        )
    if chosen == XLA:
        return jax.lax.psum_scatter(_product(x_TK, w_KN), axis, scatter_dimension=dim, tiled=True)
    return _matmul_reduce_scatter(x_TK, w_KN, axis, dim)


def _checked(name: str, x: jax.Array, w: jax.Array, axis: str, dim: int, implementation: str) -> tuple[int, str]:
    """The dim counted from the front, and the implementation."""
    asked = f"kernels.{name}(x, w, axis={axis!r})"
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if axis not in manual:
        raise ShardingError(
            asked,
            found=f"manual axes {', '.join(map(repr, manual))}" if manual else "no manual axis",
            required=f"a call in a shard_map over {axis!r}",
            fix=f"jax.shard_map(..., axis_names={{{axis!r}}})",
        )
    if (
        x.ndim < 2
        or w.ndim != 2
        or x.shape[-1] != w.shape[0]
        or not -x.ndim <= dim < x.ndim
        or dim % x.ndim == x.ndim - 1
    ):
        raise ShardingError(
            asked, found=f"x of shape {x.shape}, w of shape {w.shape}, dim={dim}", required="x [..., T, K], w [K, N]"
        )
    return dim % x.ndim, choose(name, IMPLEMENTATIONS, implementation, x, w)


def _product(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tensordot(x, w, 1)


def _hops(n: int) -> tuple[int, int]:
    """How far shards travel up and down a ring of `n` devices, so that each reaches every other once."""
    return n // 2, (n - 1) // 2


def _sent(x: jax.Array, axis: str, step: int) -> jax.Array:
    n = jax.lax.axis_size(axis)
    return jax.lax.ppermute(x, axis, [(k, (k + step) % n) for k in range(n)])


def _shards(x: jax.Array, axis: str) -> Iterator[tuple[jax.Array, jax.Array]]:
    """(index of the device, its shard), of all devices, this one's first, as they arrive."""
    n, here = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    yield here, x
    up = down = x
    for hop in range(1, max(_hops(n)) + 1):
        for step, most in zip((1, -1), _hops(n), strict=True):
            if hop <= most:
                shard = _sent(up if step == 1 else down, axis, step)
                up, down = (shard, down) if step == 1 else (up, shard)
                yield (here - step * hop) % n, shard


def _summed(part: Callable[[jax.Array], jax.Array], axis: str) -> jax.Array:
    """The sum over all devices of `part(here)`, where each computes `part` of any device's index."""
    n, here = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    total = None
    for step, most in zip((1, -1), _hops(n), strict=True):
        sum_ = None
        for hop in range(most, 0, -1):  # it ends `hop` devices further on
            own = part((here + step * hop) % n)
            sum_ = _sent(own if sum_ is None else sum_ + own, axis, step)
        if sum_ is not None:
            total = sum_ if total is None else total + sum_
    own = part(here)
    return own if total is None else total + own


def _rows(x: jax.Array, index: jax.Array, rows: int, dim: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, index * rows, rows, dim)


def _stacked(make: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array, axis: str, dim: int) -> jax.Array:
    """`make(index, shard)` of all devices' shards, concatenated in their order."""
    found: Any = None
    for index, shard in _shards(x, axis):
        made = make(index, shard)
        if found is None:
            shape = list(made.shape)
            shape[dim] *= jax.lax.axis_size(axis)
            found = jnp.zeros(shape, made.dtype)
        found = jax.lax.dynamic_update_slice_in_dim(found, made, index * made.shape[dim], dim)
    return found


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _all_gather_matmul(x_TK: jax.Array, w_KN: jax.Array, axis: str, dim: int) -> jax.Array:
    return _stacked(lambda _, shard: _product(shard, w_KN), x_TK, axis, dim)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _matmul_reduce_scatter(x_TK: jax.Array, w_KN: jax.Array, axis: str, dim: int) -> jax.Array:
    rows = x_TK.shape[dim] // jax.lax.axis_size(axis)
    return _summed(lambda index: _product(_rows(x_TK, index, rows, dim), w_KN), axis)


def _gather_backward(axis: str, dim: int, kept: Any, ct: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Shards of `x` travel again, instead of all being kept."""
    (x_TK, ct), w_KN = jax.lax.optimization_barrier((kept[0], ct)), kept[1]
    of_x: jax.Array = _matmul_reduce_scatter(ct, w_KN.T, axis, dim)
    of_w: list[jax.Array] = [
        _outer(shard, _rows(ct, index, x_TK.shape[dim], dim)) for index, shard in _shards(x_TK, axis)
    ]
    return of_x.astype(x_TK.dtype), functools.reduce(operator.add, of_w).astype(w_KN.dtype)


def _scatter_backward(axis: str, dim: int, kept: Any, ct: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Shards of the cotangent travel once, for both gradients."""
    x_TK, w_KN = kept
    of_w: list[jax.Array] = []

    def one(index: jax.Array, shard: jax.Array) -> jax.Array:
        of_w.append(_outer(_rows(x_TK, index, shard.shape[dim], dim), shard))
        return _product(shard, w_KN.T)

    of_x = _stacked(one, ct, axis, dim)
    return of_x.astype(x_TK.dtype), functools.reduce(operator.add, of_w).astype(w_KN.dtype)


def _outer(x: jax.Array, ct: jax.Array) -> jax.Array:
    """The gradient of a weight, of some rows; in float32, as others are added."""
    dims = range(x.ndim - 1)
    return jax.lax.dot_general(x, ct, ((dims, dims), ((), ())), preferred_element_type=jnp.float32)


_all_gather_matmul.defvjp(lambda *args: (_all_gather_matmul(*args), args[:2]), _gather_backward)
_matmul_reduce_scatter.defvjp(lambda *args: (_matmul_reduce_scatter(*args), args[:2]), _scatter_backward)
