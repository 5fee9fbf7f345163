"""Cross entropy of a linear layer on Hopper GPUs, forward: a tile of logits is in registers only.

A matmul by warpgroup instructions, whose epilogue keeps of each tile of logits its logsumexp and its label's logit per
token: V / 128 pairs of numbers per token. Two warpgroups compute 64 rows of a tile each, a third one loads. What is
left of the vocabulary after whole tiles, less than 128 columns, is computed by XLA.

Shape suffixes: T tokens, M features, V vocabulary, C columns of a tile, J tiles, 1 a dim of size 1.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from . import cross_entropy_block as block
from . import cross_entropy_scan
from .cross_entropy_block import Softmax
from .implementation import gpu_kernel, unsupported

WARPGROUPS, ROWS, COLUMNS, DEEP = 2, 64, 128, 64
"""That compute; rows of the tile of each, its columns, and the features that a step loads."""

STEPS_IN_FLIGHT = 4
"""Loads of x and w: 32 KiB each of 227 KiB of shared memory."""

SNAKE_COLUMNS = 16
"""Tiles side by side that programs take in turn, so that the tiles of x stay in the L2 cache."""

PROGRAMS = 132
"""The multiprocessors of an H100; each takes tiles until none is left."""

ALIGNMENT_BYTES = 16
"""Of the rows of an array that the copy engine reads."""


def obstacle(x: Any, w: Any, *, transposed: bool, num_parts: int) -> str:
    """Why the kernel can't run, or an empty text; the vocabulary may be sharded into as many parts."""
    if missing := unsupported("mosaic_gpu"):
        return missing
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return "x and w of bfloat16 or float16"
    if x.shape[-1] % DEEP or not x.shape[-1]:
        return f"features of a multiple of {DEEP}"
    vocabulary, aligned = w.shape[0 if transposed else 1], ALIGNMENT_BYTES // x.dtype.itemsize
    if not transposed and (vocabulary // num_parts) % aligned:
        return f"a vocabulary of a multiple of {aligned * num_parts}, or w transposed"
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
    tokens, vocabulary = len(x_TM), w.shape[0 if is_transposed else 1]
    whole = vocabulary // COLUMNS * COLUMNS
    found = block.empty(tokens)
    if whole and tokens:
        rows = pl.cdiv(tokens, WARPGROUPS * ROWS) * WARPGROUPS * ROWS
        x_padded, labels = (jnp.pad(y, ((0, rows - tokens), (0, 0))) for y in (x_TM, labels_T1))
        logsumexp_JT, target_JT = _tiles(x_padded, w, bias_V, labels[:, 0], softcap, is_transposed, interpret)
        maximum_T = jnp.max(logsumexp_JT, axis=0)
        total_T = jnp.sum(jnp.exp(logsumexp_JT - maximum_T[None]), axis=0)
        found = Softmax(*(y[:tokens, None] for y in (maximum_T, total_T, jnp.sum(target_JT, axis=0))))
    if whole == vocabulary:
        return found
    rest = functools.partial(jax.lax.slice_in_dim, start_index=whole, limit_index=vocabulary)
    bias_rest = None if bias_V is None else rest(bias_V, axis=0)
    of_rest = cross_entropy_scan.forward(
        x_TM,
        rest(w, axis=0 if is_transposed else 1),
        bias_rest,
        labels_T1 - whole,
        softcap=softcap,
        is_transposed=is_transposed,
    )
    return block.merged(found, of_rest)


def _tiles(
    x_TM: jax.Array,
    w: jax.Array,
    bias_V: jax.Array | None,
    labels_T: jax.Array,
    softcap: float | None,
    is_transposed: bool,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """Of each whole tile of columns: logsumexps and label logits or 0, [J, T] both."""
    (tokens, features), vocabulary = x_TM.shape, w.shape[0 if is_transposed else 1]
    tiles = vocabulary // COLUMNS
    grid = tokens // (WARPGROUPS * ROWS), tiles
    operands = [x_TM, w, labels_T, *([] if bias_V is None else [bias_V.astype(jnp.float32)])]
    transforms = plgpu.TilingTransform((8, DEEP)), plgpu.SwizzleTransform(2 * DEEP)
    of_w = plgpu.BlockSpec(
        (COLUMNS, DEEP) if is_transposed else (DEEP, COLUMNS),
        lambda k: (0, k) if is_transposed else (k, 0),
        transforms=transforms,
        delay_release=1,
    )
    of_x = plgpu.BlockSpec((WARPGROUPS * ROWS, DEEP), lambda k: (0, k), transforms=transforms, delay_release=1)

    def pipeline(step: Any, context: Any) -> Any:
        return plgpu.emit_pipeline_warp_specialized(
            step,
            grid=(features // DEEP,),
            memory_registers=40,
            in_specs=[of_x, of_w],
            wg_axis="warpgroup",
            num_compute_wgs=WARPGROUPS,
            max_concurrent_steps=min(STEPS_IN_FLIGHT, max(2, features // DEEP)),
            compute_context=context,
        )

    def kernel(*refs: Any) -> None:
        x, w, labels, *bias = refs[: len(operands)]
        logsumexps, targets = refs[len(operands) :]

        def body(allocations: Any, out: Any) -> None:
            mine = jax.lax.axis_index("warpgroup")

            @plgpu.nd_loop((grid[0] * grid[1],), collective_axes="program")
            def _tile(loop: Any) -> None:
                i, j = plgpu.planar_snake(loop.index[0], grid, 1, SNAKE_COLUMNS)
                row = i * WARPGROUPS * ROWS
                w_tile = w.at[pl.ds(j * COLUMNS, COLUMNS), :] if is_transposed else w.at[:, pl.ds(j * COLUMNS, COLUMNS)]

                def step(_: Any, x_block: Any, w_block: Any, acc: Any) -> Any:
                    right = w_block.transpose((1, 0)) if is_transposed else w_block
                    plgpu.wgmma(acc, x_block.at[pl.ds(mine * ROWS, ROWS)], right)
                    plgpu.wgmma_wait(1)
                    return acc

                def context(run: Any) -> None:
                    def with_accumulator(acc: Any) -> None:
                        run(acc)
                        z_TC = acc[...]
                        mine_T = pl.ds(row + mine * ROWS, ROWS)
                        label_T = plgpu.load(labels.at[mine_T], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
                        bias_C = None
                        if bias:
                            mine_C = pl.ds(j * COLUMNS, COLUMNS)
                            bias_C = plgpu.load(
                                bias[0].at[mine_C], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False
                            )
                        found = _statistics(z_TC, label_T - j * COLUMNS, bias_C, softcap)
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                        for n, value in enumerate(found):
                            out[mine, n] = value
                        plgpu.commit_smem()
                        for n, ref in enumerate((logsumexps, targets)):
                            plgpu.copy_smem_to_gmem(out.at[mine, n], ref.at[j, mine_T])

                    pl.run_scoped(with_accumulator, plgpu.WGMMAAccumulatorRef((ROWS, COLUMNS), jnp.float32))

                pipeline(step, context)(x.at[pl.ds(row, WARPGROUPS * ROWS), :], w_tile, allocations=allocations)

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        pl.run_scoped(
            body,
            allocations=pipeline(_nothing, _nothing).get_allocations(x, w),
            out=plgpu.SMEM((WARPGROUPS, 2, ROWS), jnp.float32),
            collective_axes="warpgroup",
        )

    num_logits = tokens * tiles * COLUMNS
    cost = pl.CostEstimate(
        flops=2 * features * num_logits,
        transcendentals=(1 if softcap is None else 2) * num_logits,
        bytes_accessed=sum(y.size * y.dtype.itemsize for y in operands),
    )
    return gpu_kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct((tiles, tokens), jnp.float32)] * 2,
        grid=(min(PROGRAMS, grid[0] * grid[1]),),
        grid_names=("program",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        cost_estimate=cost,
        interpret=interpret,
        kernel_name="linear_cross_entropy",
    )(*operands)


def _statistics(
    logits_TC: jax.Array, label_T: jax.Array, bias_C: jax.Array | None, softcap: float | None
) -> tuple[jax.Array, jax.Array]:
    """The logsumexp of each row, and the logit of its label or 0."""
    shape = logits_TC.shape
    if bias_C is not None:
        logits_TC = logits_TC + jax.lax.broadcast_in_dim(bias_C, shape, [1])
    z_TC = logits_TC if softcap is None else softcap * jnp.tanh(logits_TC / softcap)
    maximum_T = jnp.max(z_TC, axis=1)
    total_T = jnp.sum(jnp.exp(z_TC - jax.lax.broadcast_in_dim(maximum_T, shape, [0])), axis=1)
    column_TC = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
    is_label_TC = column_TC == jax.lax.broadcast_in_dim(label_T, shape, [0])
    return maximum_T + jnp.log(total_T), jnp.sum(jnp.where(is_label_TC, z_TC, 0.0), axis=1)


def _nothing(*_: Any) -> None: ...
