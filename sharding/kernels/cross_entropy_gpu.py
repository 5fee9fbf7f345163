"""Cross entropy of a linear layer on Hopper GPUs: a tile of logits is in registers only.

A matmul by warpgroup instructions, whose epilogue keeps of each tile of logits its logsumexp and its label's logit per
token: V / 256 pairs of numbers per token. Backward, the same matmul keeps the cotangents of a block of logits in 16
bits, which XLA then multiplies. Two warpgroups compute 64 rows of a tile each, a third one loads. What is left of the
vocabulary after whole tiles, less than 256 columns, is computed by XLA.

Shape suffixes: T tokens, M features, V vocabulary, C columns of a tile, J tiles, 1 a dim of size 1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from . import cross_entropy_block as block
from . import cross_entropy_scan
from .cross_entropy_block import Cotangents, Softmax
from .cross_entropy_scan import LogitsKernel
from .implementation import gpu_kernel, load, unsupported

WARPGROUPS, ROWS, COLUMNS, DEEP = 2, 64, 256, 64
"""That compute; rows of the tile of each, its columns, and the features that a step loads."""

TILE_ROWS = WARPGROUPS * ROWS

STEPS_IN_FLIGHT = 3
"""Loads of x and w: 48 KiB each of 227 KiB of shared memory."""

SNAKE_COLUMNS = 16
"""Tiles side by side that programs take in turn, so that the tiles of x stay in the L2 cache."""

BLOCK_BYTES, MOST_COLUMNS = 512 * 2**20, 16_384
"""Of the cotangents of a block of logits, at most: matmuls of so many columns run at full rate."""

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
        rows = pl.cdiv(tokens, TILE_ROWS) * TILE_ROWS
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
    """Gradients of x, w and bias, in their dtypes.

    That of a bias sums cotangents in float32, so with one XLA computes them.
    """
    kernel = None
    if bias_V is None and len(x_TM):
        columns = cross_entropy_scan.columns_of_block(2 * len(x_TM), BLOCK_BYTES, COLUMNS, MOST_COLUMNS)
        kernel = LogitsKernel(functools.partial(of_logits, interpret=interpret), COLUMNS, columns)
    return cross_entropy_scan.backward(
        x_TM, w, bias_V, cts, softcap=softcap, is_transposed=is_transposed, kernel=kernel
    )


def of_logits(
    x_TM: jax.Array,
    w: jax.Array,
    cts: Cotangents,
    *,
    softcap: float | None,
    is_transposed: bool,
    interpret: Any,
) -> jax.Array:
    """Cotangents of the logits of all columns of w, whole tiles, [T, V] in the dtype of w."""
    tokens, vocabulary = len(x_TM), w.shape[0 if is_transposed else 1]
    rows = pl.cdiv(tokens, TILE_ROWS) * TILE_ROWS
    x_TM, labels_T1, *floats_T1 = (jnp.pad(y, ((0, rows - tokens), (0, 0))) for y in (x_TM, *cts))
    per_token = [labels_T1[:, 0], *(y[:, 0].astype(jnp.float32) for y in floats_T1)]

    def cotangents(z_TC: jax.Array, j: Any, mine_T: Any, refs: Sequence[Any]) -> list[jax.Array]:
        label_T, *floats_T = (_load(ref, mine_T, 1) for ref in refs)
        z_TC = _capped(z_TC, (), j, softcap)
        over = functools.partial(jax.lax.broadcast_in_dim, shape=z_TC.shape, broadcast_dimensions=[0])
        logsumexp_TC, of_softmax_TC, of_target_TC = map(over, floats_T)
        is_label_TC = _columns(z_TC) == over(label_T - j * COLUMNS)
        of_z_TC = jnp.exp(z_TC - logsumexp_TC) * of_softmax_TC + jnp.where(is_label_TC, of_target_TC, 0.0)
        if softcap is not None:
            of_z_TC = of_z_TC * (1 - z_TC / softcap * (z_TC / softcap))
        return [of_z_TC.astype(w.dtype)]

    swizzle = plgpu.TilingTransform((8, DEEP)), plgpu.SwizzleTransform(2 * DEEP)
    (found,) = _over_tiles(
        cotangents,
        x_TM,
        w,
        per_token,
        [jax.ShapeDtypeStruct((rows, vocabulary), w.dtype)],
        lambda ref, j, mine_T: ref.at[mine_T, pl.ds(j * COLUMNS, COLUMNS)],
        plgpu.SMEM((WARPGROUPS, 1, ROWS, COLUMNS), w.dtype, transforms=swizzle),
        is_transposed=is_transposed,
        transcendentals=1 if softcap is None else 2,
        interpret=interpret,
        name="linear_cross_entropy_gradients",
    )
    return found[:tokens]


def _tiles(
    x_TM: jax.Array,
    w: jax.Array,
    bias_V: jax.Array | None,
    labels_T: jax.Array,
    softcap: float | None,
    is_transposed: bool,
    interpret: Any,
) -> Sequence[jax.Array]:
    """Of each whole tile of columns: logsumexps and label logits or 0, [J, T] both."""

    def statistics(z_TC: jax.Array, j: Any, mine_T: Any, refs: Sequence[Any]) -> Sequence[jax.Array]:
        return _statistics(_capped(z_TC, refs[1:], j, softcap), _load(refs[0], mine_T, 1) - j * COLUMNS)

    tiles = w.shape[0 if is_transposed else 1] // COLUMNS
    return _over_tiles(
        statistics,
        x_TM,
        w,
        [labels_T, *([] if bias_V is None else [bias_V.astype(jnp.float32)])],
        [jax.ShapeDtypeStruct((tiles, len(x_TM)), jnp.float32)] * 2,
        lambda ref, j, mine_T: ref.at[j, mine_T],
        plgpu.SMEM((WARPGROUPS, 2, ROWS), jnp.float32),
        is_transposed=is_transposed,
        transcendentals=1 if softcap is None else 2,
        interpret=interpret,
        name="linear_cross_entropy",
    )


def _over_tiles(
    epilogue: Callable[..., Sequence[jax.Array]],
    x_TM: jax.Array,
    w: jax.Array,
    more: Sequence[jax.Array],
    results: Sequence[jax.ShapeDtypeStruct],
    place: Callable[..., Any],
    staging: Any,
    *,
    is_transposed: bool,
    transcendentals: int,
    interpret: Any,
    name: str,
) -> Sequence[jax.Array]:
    """Logits tile by tile, of which the results of an epilogue are stored.

    Args:
        epilogue: (logits [ROWS, COLUMNS], number of the tile's columns, its rows, references to `more`) -> values.
        x_TM: its tokens are a multiple of `TILE_ROWS`.
        w: what is left of the vocabulary after whole tiles is not read.
        more: operands of the epilogue.
        results: one for each value.
        place: (result, number of the tile's columns, its rows) -> where the value goes.
        staging: shared memory [WARPGROUPS, results, ...] for the values.
        is_transposed: whether w is [V, M].
        transcendentals: of a logit.
        interpret: the `interpret=` of the kernel.
        name: of the kernel.
    """
    (tokens, features), tiles = x_TM.shape, w.shape[0 if is_transposed else 1] // COLUMNS
    grid = tokens // TILE_ROWS, tiles
    operands = [x_TM, w, *more]
    transforms = plgpu.TilingTransform((8, DEEP)), plgpu.SwizzleTransform(2 * DEEP)
    of_w = plgpu.BlockSpec(
        (COLUMNS, DEEP) if is_transposed else (DEEP, COLUMNS),
        lambda k: (0, k) if is_transposed else (k, 0),
        transforms=transforms,
        delay_release=1,
    )
    of_x = plgpu.BlockSpec((TILE_ROWS, DEEP), lambda k: (0, k), transforms=transforms, delay_release=1)

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
        x, w, *rest = refs[: len(operands)]
        outs = refs[len(operands) :]

        def body(allocations: Any, staged: Any) -> None:
            mine = jax.lax.axis_index("warpgroup")

            @plgpu.nd_loop((grid[0] * grid[1],), collective_axes="program")
            def _tile(loop: Any) -> None:
                i, j = plgpu.planar_snake(loop.index[0], grid, 1, SNAKE_COLUMNS)
                row = i * TILE_ROWS
                w_tile = w.at[pl.ds(j * COLUMNS, COLUMNS), :] if is_transposed else w.at[:, pl.ds(j * COLUMNS, COLUMNS)]

                def step(_: Any, x_block: Any, w_block: Any, acc: Any) -> Any:
                    right = w_block.transpose((1, 0)) if is_transposed else w_block
                    plgpu.wgmma(acc, x_block.at[pl.ds(mine * ROWS, ROWS)], right)
                    plgpu.wgmma_wait(1)
                    return acc

                def context(run: Any) -> None:
                    def with_accumulator(acc: Any) -> None:
                        run(acc)
                        mine_T = pl.ds(row + mine * ROWS, ROWS)
                        found = epilogue(acc[...], j, mine_T, rest)
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                        for n, value in enumerate(found):
                            staged[mine, n] = value
                        plgpu.commit_smem()
                        for n, ref in enumerate(outs):
                            plgpu.copy_smem_to_gmem(staged.at[mine, n], place(ref, j, mine_T))

                    pl.run_scoped(with_accumulator, plgpu.WGMMAAccumulatorRef((ROWS, COLUMNS), jnp.float32))

                pipeline(step, context)(x.at[pl.ds(row, TILE_ROWS), :], w_tile, allocations=allocations)

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        pl.run_scoped(
            body,
            allocations=pipeline(_nothing, _nothing).get_allocations(x, w),
            staged=staging,
            collective_axes="warpgroup",
        )

    num_logits = tokens * tiles * COLUMNS
    cost = pl.CostEstimate(
        flops=2 * features * num_logits,
        transcendentals=transcendentals * num_logits,
        bytes_accessed=sum(y.size * y.dtype.itemsize for y in (*operands, *results)),
    )
    return gpu_kernel(
        kernel,
        out_type=list(results),
        grid=(min(PROGRAMS, grid[0] * grid[1]),),
        grid_names=("program",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        cost_estimate=cost,
        interpret=interpret,
        kernel_name=name,
    )(*operands)


def _load(ref: Any, place: Any, axis: int) -> jax.Array:
    """A vector, in registers as what remains of a tile that is reduced along an axis."""
    return load(ref.at[place], plgpu.Layout.WGMMA.reduce(axis))


def _columns(z_TC: jax.Array) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, z_TC.shape, 1, layout=plgpu.Layout.WGMMA)


def _capped(z_TC: jax.Array, bias: Sequence[Any], j: Any, softcap: float | None) -> jax.Array:
    if bias:
        bias_C = _load(bias[0], pl.ds(j * COLUMNS, COLUMNS), 0)
        z_TC = z_TC + jax.lax.broadcast_in_dim(bias_C, z_TC.shape, [1])
    # The GPU's own tanh has errors of 5e-4.
    return z_TC if softcap is None else softcap * (1 - 2 / (1 + jnp.exp(2 / softcap * z_TC)))


def _statistics(z_TC: jax.Array, label_T: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The logsumexp of each row, and the logit of its label or 0."""
    maximum_T = jnp.max(z_TC, axis=1)
    total_T = jnp.sum(jnp.exp(z_TC - jax.lax.broadcast_in_dim(maximum_T, z_TC.shape, [0])), axis=1)
    is_label_TC = _columns(z_TC) == jax.lax.broadcast_in_dim(label_T, z_TC.shape, [0])
    return maximum_T + jnp.log(total_T), jnp.sum(jnp.where(is_label_TC, z_TC, 0.0), axis=1)


def _nothing(*_: Any) -> None: ...
