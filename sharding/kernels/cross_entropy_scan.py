"""Cross entropy of a linear layer in plain JAX: a scan over blocks of the vocabulary, each of whose logits is dropped.

The backward pass computes each block's logits again: 3 matmuls, against 2 of a pass that keeps the logits.

Shape suffixes: T tokens, M features, V vocabulary, C columns of a block, 1 a dim of size 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from . import cross_entropy_block as block
from .cross_entropy_block import Cotangents, Softmax

BLOCK_BYTES = 128 * 2**20
"""The most that the float32 logits of a block take, unless they are of `LEAST_COLUMNS`."""

LEAST_COLUMNS, MOST_COLUMNS = 512, 2048
"""Of a block: enough for a matmul to be efficient."""


class LogitsKernel(NamedTuple):
    """A kernel of the cotangents of a block's logits, without a bias, which stores no logits."""

    of_logits: Callable[..., jax.Array]
    """As `cross_entropy_gpu.of_logits`, of whole tiles of columns."""
    tile_columns: int
    block_columns: int
    """Of a block, at most."""


def forward(
    x_TM: jax.Array,
    w: jax.Array,
    bias_V: jax.Array | None,
    labels_T1: jax.Array,
    *,
    softcap: float | None,
    is_transposed: bool,
) -> Softmax:
    """The softmax of each token's logits, with w [M, V] or, transposed, [V, M]."""

    def add(so_far: Softmax, start: Any, columns: int) -> Softmax:
        z_TC, is_label_TC, _ = _block(x_TM, w, bias_V, labels_T1, start, columns, softcap, is_transposed)
        return block.added(so_far, z_TC, is_label_TC)

    vocabulary = w.shape[0 if is_transposed else 1]
    return _over_blocks(add, block.empty(len(x_TM)), len(x_TM), vocabulary)


def backward(
    x_TM: jax.Array,
    w: jax.Array,
    bias_V: jax.Array | None,
    cts: Cotangents,
    *,
    softcap: float | None,
    is_transposed: bool,
    kernel: LogitsKernel | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Gradients of x, w and bias, in their dtypes."""
    dim = 0 if is_transposed else 1

    def add(so_far: Any, start: Any, columns: int) -> Any:
        of_x_TM, of_w, of_bias_V = so_far
        if kernel is not None and columns % kernel.tile_columns == 0:
            w_block = lax.dynamic_slice_in_dim(w, start, columns, dim)
            of_block = cts._replace(labels_T1=cts.labels_T1 - start)
            ct_TC = kernel.of_logits(x_TM, w_block, of_block, softcap=softcap, is_transposed=is_transposed)
        else:
            z_TC, is_label_TC, w_block = _block(x_TM, w, bias_V, cts.labels_T1, start, columns, softcap, is_transposed)
            ct_TC = block.of_logits(z_TC, is_label_TC, cts, softcap)
        of_x_TM = of_x_TM + block.of_x(ct_TC, w_block, is_transposed)
        of_block = block.of_w(x_TM, ct_TC, is_transposed).astype(w.dtype)
        of_w = lax.dynamic_update_slice_in_dim(of_w, of_block, start, dim)
        if bias_V is not None:
            of_bias_V = lax.dynamic_update_slice_in_dim(of_bias_V, ct_TC.sum(0).astype(bias_V.dtype), start, 0)
        return of_x_TM, of_w, of_bias_V

    start = jnp.zeros(x_TM.shape, jnp.float32), jnp.zeros_like(w), None if bias_V is None else jnp.zeros_like(bias_V)
    of_x_TM, of_w, of_bias_V = _over_blocks(add, start, len(x_TM), w.shape[dim], kernel)
    return of_x_TM.astype(x_TM.dtype), of_w, of_bias_V


def columns_of_block(column_bytes: int, block_bytes: int, least: int, most: int) -> int:
    """A power of two."""
    fit = block_bytes // max(column_bytes, 1)
    return 2 ** (min(max(fit, least), most).bit_length() - 1)


def _block(
    x_TM: jax.Array,
    w: jax.Array,
    bias_V: jax.Array | None,
    labels_T1: jax.Array,
    start: Any,
    columns: int,
    softcap: float | None,
    is_transposed: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """z, which of them are of labels, and the columns of w."""
    w_block = lax.dynamic_slice_in_dim(w, start, columns, 0 if is_transposed else 1)
    bias_1C = None if bias_V is None else lax.dynamic_slice_in_dim(bias_V, start, columns, 0)[None]
    z_TC = block.capped(block.product(x_TM, w_block, is_transposed), bias_1C, softcap)
    is_label_TC = lax.broadcasted_iota(jnp.int32, z_TC.shape, 1) == labels_T1 - start
    return z_TC, is_label_TC, w_block


def _over_blocks(
    add: Callable[[Any, Any, int], Any], start: Any, tokens: int, vocabulary: int, kernel: LogitsKernel | None = None
) -> Any:
    """Adds all blocks: equal ones in a scan, then the rest."""
    columns = min(columns_of_block(4 * tokens, BLOCK_BYTES, LEAST_COLUMNS, MOST_COLUMNS), vocabulary)
    if kernel is not None and vocabulary >= kernel.tile_columns:
        blocks = -(-vocabulary // kernel.block_columns)
        columns = max(1, vocabulary // blocks // kernel.tile_columns) * kernel.tile_columns
    count, rest = divmod(vocabulary, columns)
    starts = jnp.arange(count, dtype=jnp.int32) * columns
    found = lax.scan(lambda so_far, at: (add(so_far, at, columns), None), start, starts)[0]
    return add(found, jnp.int32(count * columns), rest) if rest else found
