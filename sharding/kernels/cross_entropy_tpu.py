"""Cross entropy of a linear layer on TPUs: a block of logits is in VMEM only, forward and backward.

Forward, x and w are streamed as in a tiled matmul. Backward, one kernel has the gradient of some tokens' x and streams
w; another has the gradient of some columns of w and streams x. Both compute the logits again: 4 matmuls, none of whose
results [tokens, columns] leaves the core.

Shape suffixes: T tokens, M features, V vocabulary, C columns of a block, 1 a dim of size 1.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from . import cross_entropy_block as block
from .cross_entropy_block import Cotangents, Softmax
from .implementation import tpu_kernel, unsupported

LANES = 128

BLOCK_BYTES = 4 * 2**20
"""Of each block of x and w that has all features."""

MOST_COLUMNS, MOST_FEATURES = 1024, 512
"""Of a block in the forward pass."""

VMEM_LIMIT_BYTES = 60 * 2**20
"""A core of a v5p or of a later TPU has 64 MiB or more."""

MOST_ROW_BYTES = BLOCK_BYTES // LANES
"""Of all features of a token: a backward block has 128 tokens or more."""


def obstacle(x: Any, w: Any, *, transposed: bool, num_parts: int) -> str:
    """Why the kernel can't run, or an empty text."""
    if missing := unsupported("mosaic_tpu"):
        return missing
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        return "x and w of float32 or bfloat16"
    features = x.shape[-1]
    if features % LANES and features > MOST_FEATURES:
        return f"at most {MOST_FEATURES} features, or a multiple of {LANES}"
    if features * x.dtype.itemsize > MOST_ROW_BYTES:
        return f"at most {MOST_ROW_BYTES // x.dtype.itemsize:,} features"
    return ""


def forward(
    x_TM: jax.Array,
    w: jax.Array,
    bias_V: jax.Array | None,
    labels_T1: jax.Array,
    *,
    softcap: float | None,
    is_transposed: bool,
    interpret: Any,
) -> Softmax:
    """The softmax of each token's logits, with w [M, V] or, transposed, [V, M]."""
    w, is_transposed = _as_stored(w, is_transposed)
    (tokens, features), vocabulary = x_TM.shape, w.shape[0 if is_transposed else 1]
    if not tokens:
        return block.empty(0)
    rows, columns = _fitted(tokens, MOST_COLUMNS), _fitted(vocabulary, MOST_COLUMNS)
    deep = features if features % LANES else max(d for d in range(LANES, MOST_FEATURES + 1, LANES) if not features % d)
    grid = pl.cdiv(tokens, rows), pl.cdiv(vocabulary, columns), features // deep

    def kernel(*refs: Any) -> None:
        x, w, labels, *bias = refs[: len(operands)]
        out, (logits, *so_far) = refs[len(operands) :][:3], refs[len(operands) + 3 :]
        j, k = pl.program_id(1), pl.program_id(2)

        @pl.when((j == 0) & (k == 0))
        def _start() -> None:
            for ref, value in zip(so_far, block.empty(rows), strict=True):
                ref[...] = value

        part = block.product(x[...], w[...], is_transposed)
        logits[...] = jnp.where(k == 0, part, logits[...] + part) if grid[2] > 1 else part

        @pl.when(k == grid[2] - 1)
        def _add() -> None:
            z_TC = block.capped(logits[...], bias[0][...] if bias else None, softcap)
            column_TC = j * columns + jax.lax.broadcasted_iota(jnp.int32, z_TC.shape, 1)
            labels_T1 = labels[...]
            if vocabulary % columns:
                z_TC = jnp.where(column_TC < vocabulary, z_TC, -jnp.inf)
                labels_T1 = jnp.where(labels_T1 < vocabulary, labels_T1, -1)
            found = block.added(Softmax(*(ref[...] for ref in so_far)), z_TC, column_TC == labels_T1)
            for ref, value in zip((*so_far, *out), (*found, *found), strict=True):
                ref[...] = value

    operands = [x_TM, w, labels_T1, *([] if bias_V is None else [bias_V[None]])]
    of_w = pl.BlockSpec((columns, deep), lambda i, j, k: (j, k))
    if not is_transposed:
        of_w = pl.BlockSpec((deep, columns), lambda i, j, k: (k, j))
    of_token = pl.BlockSpec((rows, 1), lambda i, j, k: (i, 0))
    of_x = pl.BlockSpec((rows, deep), lambda i, j, k: (i, k))
    found = tpu_kernel(
        kernel,
        grid=grid,
        in_specs=[of_x, of_w, of_token, pl.BlockSpec((1, columns), lambda i, j, k: (0, j))][: len(operands)],
        out_specs=[of_token] * 3,
        out_shape=[jax.ShapeDtypeStruct((tokens, 1), jnp.float32)] * 3,
        scratch_shapes=[pltpu.VMEM((rows, columns), jnp.float32), *[pltpu.VMEM((rows, 1), jnp.float32)] * 3],
        compiler_params=_parameters("parallel", "arbitrary", "arbitrary"),
        cost_estimate=_cost(2, operands, tokens * vocabulary, softcap),
        interpret=interpret,
        name="linear_cross_entropy",
    )(*operands)
    return Softmax(*found)


def backward(
    x_TM: jax.Array,
    w: jax.Array,
    bias_V: jax.Array | None,
    cts: Cotangents,
    *,
    softcap: float | None,
    is_transposed: bool,
    interpret: Any,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Gradients of x, w and bias, in their dtypes."""
    if not len(x_TM):
        return x_TM, jnp.zeros_like(w), None if bias_V is None else jnp.zeros_like(bias_V)
    given, (w, is_transposed) = w, _as_stored(w, is_transposed)
    (tokens, features), vocabulary = x_TM.shape, w.shape[0 if is_transposed else 1]
    fit = min(BLOCK_BYTES // (features * x_TM.dtype.itemsize), 512)
    rows, columns = _fitted(tokens, fit), _fitted(vocabulary, fit)
    grid = pl.cdiv(tokens, rows), pl.cdiv(vocabulary, columns)
    operands = [x_TM, w, *cts, *([] if bias_V is None else [bias_V[None]])]

    def cotangents(ins: Any, i: Any, j: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """x and w of a block, and the cotangents of its logits; what is beyond the last token and column is 0."""
        x, w, *of_tokens = (ref[...] for ref in ins)
        cts, bias = Cotangents(*of_tokens[:4]), of_tokens[4:]
        z_TC = block.capped(block.product(x, w, is_transposed), bias[0] if bias else None, softcap)
        column_TC = j * columns + jax.lax.broadcasted_iota(jnp.int32, z_TC.shape, 1)
        ct_TC = block.of_logits(z_TC, column_TC == cts.labels_T1, cts, softcap)
        if vocabulary % columns:
            ct_TC = jnp.where(column_TC < vocabulary, ct_TC, 0.0)
            w = _until(vocabulary - j * columns, w, 0 if is_transposed else 1)
        if tokens % rows:
            ct_TC, x = (_until(tokens - i * rows, y, 0) for y in (ct_TC, x))
        return x, w, ct_TC

    def of_x(*refs: Any) -> None:
        (*ins, out, total), i, j = refs, pl.program_id(0), pl.program_id(1)
        _, w, ct_TC = cotangents(ins, i, j)
        _add(total, block.of_x(ct_TC, w, is_transposed), j, out, grid[1])

    def of_w(*refs: Any) -> None:
        ins, outs, totals = refs[: len(operands)], refs[len(operands) : -num_results], refs[-num_results:]
        j, i = pl.program_id(0), pl.program_id(1)
        x, _, ct_TC = cotangents(ins, i, j)
        parts = [block.of_w(x, ct_TC, is_transposed), jnp.sum(ct_TC, axis=0, keepdims=True)]
        for out, total, part in zip(outs, totals, parts, strict=False):
            _add(total, part, i, out, grid[0])

    def specs(order: Any) -> list[pl.BlockSpec]:
        """Of the operands, with the grid's order: (program ids) -> (block of tokens, block of columns)."""
        of_w = pl.BlockSpec((columns, features), lambda *ids: (order(*ids)[1], 0))
        if not is_transposed:
            of_w = pl.BlockSpec((features, columns), lambda *ids: (0, order(*ids)[1]))
        of_token = pl.BlockSpec((rows, 1), lambda *ids: (order(*ids)[0], 0))
        of_bias = pl.BlockSpec((1, columns), lambda *ids: (0, order(*ids)[1]))
        of_x = pl.BlockSpec((rows, features), lambda *ids: (order(*ids)[0], 0))
        return [of_x, of_w, *[of_token] * 4, of_bias][: len(operands)]

    def run(kernel: Any, name: str, order: Any, results: list[int]) -> list[jax.Array]:
        """Gradients of some operands, each accumulated along the minor dim of the grid."""
        ins = specs(order)
        outs = [ins[r] for r in results]
        shapes: list[Any] = [spec.block_shape for spec in outs]
        return tpu_kernel(
            kernel,
            grid=order(*grid),
            in_specs=ins,
            out_specs=outs,
            out_shape=[jax.ShapeDtypeStruct(operands[r].shape, operands[r].dtype) for r in results],
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in shapes],
            compiler_params=_parameters("parallel", "arbitrary"),
            cost_estimate=_cost(4, operands, tokens * vocabulary, softcap),
            interpret=interpret,
            name=f"linear_cross_entropy_{name}",
        )(*operands)

    of_params = [1, *([] if bias_V is None else [6])]
    num_results = len(of_params)
    ct_x = run(of_x, "of_x", lambda i, j: (i, j), [0])[0]
    ct_w, *ct_bias = run(of_w, "of_w", lambda j, i: (i, j), of_params)
    return ct_x, ct_w if w is given else ct_w.T, ct_bias[0][0] if ct_bias else None


def _as_stored(w: jax.Array, is_transposed: bool) -> tuple[jax.Array, bool]:
    """w, or its transpose if XLA stores w so, with the dim minor that needs no padding; else XLA would copy w."""
    if not is_transposed and w.shape[1] % LANES and not w.shape[0] % LANES:
        return w.T, True
    return w, is_transposed


def _add(total: Any, part: jax.Array, step: Any, out: Any, steps: int) -> None:
    """Adds a part to a total in VMEM, which is stored after the last step."""
    total[...] = jnp.where(step == 0, part, total[...] + part)

    @pl.when(step == steps - 1)
    def _store() -> None:
        out[...] = total[...].astype(out.dtype)


def _until(count: Any, x: jax.Array, dim: int) -> jax.Array:
    """x with 0 from an index on, whatever was there."""
    return jnp.where(jax.lax.broadcasted_iota(jnp.int32, x.shape, dim) < count, x, jnp.zeros_like(x))


def _fitted(size: int, most: int) -> int:
    """The size of blocks of a dim, a multiple of 128 that wastes little of the last one."""
    blocks = pl.cdiv(size, most)
    return pl.cdiv(pl.cdiv(size, blocks), LANES) * LANES


def _parameters(*semantics: Any) -> Any:
    return pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=VMEM_LIMIT_BYTES)


def _cost(flops: int, operands: Any, num_logits: int, softcap: float | None) -> pl.CostEstimate:
    """FLOPs, per logit and feature, and bytes if each operand is read once."""
    features = operands[0].shape[1]
    return pl.CostEstimate(
        flops=flops * features * num_logits,
        transcendentals=(1 if softcap is None else 2) * num_logits,
        bytes_accessed=sum(x.size * x.dtype.itemsize for x in operands),
    )
