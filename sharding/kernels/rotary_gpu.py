"""Rotary position embedding on Hopper GPUs: a warpgroup rotates a block of positions, head after head.

The two halves of a head are separate loads, so that the elements of a pair are at the same place of two arrays in
registers; cosines and sines stay there for all heads.

Shape suffixes: B batch, S positions, N heads, D features of a head, H half of them, T all rows.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .implementation import gpu_kernel, load, unsupported

ROWS = 64
"""Positions of a block: rows of a warpgroup's matrix layout."""

ALIGNMENT = 16
"""Features of half a head: a copy is of 16 bytes or more, a swizzle of 32."""

IN_FLIGHT = 2
"""Heads that are loaded, and stored, at a time."""

MOST_FEATURES = 64
"""Of half a head: 32 registers a thread for each of four arrays."""


def obstacle(x: Any, *, half: int, is_interleaved: bool) -> str:
    """Why the kernel can't run, or an empty text."""
    if missing := unsupported("mosaic_gpu"):
        return missing
    if is_interleaved:
        return "interleaved=False"
    if 2 * half != x.shape[-1]:
        return f"features={x.shape[-1]}, all of a head"
    if half % ALIGNMENT or half > MOST_FEATURES:
        return f"heads of a multiple of {2 * ALIGNMENT} features, at most {2 * MOST_FEATURES}"
    return "" if x.dtype.itemsize in (2, 4) else "arrays of 16 or 32 bits"


def rotated(x_BSND: jax.Array, cos_ZSH: jax.Array, sin_ZSH: jax.Array, *, interpret: Any) -> jax.Array:
    """The rotation; Z is B, or 1 for tables that all share."""
    batch, length, heads, features = x_BSND.shape
    half, rows = features // 2, batch * length
    if len(cos_ZSH) == 1 and length % ROWS:  # a block has rows of several sequences
        cos_ZSH, sin_ZSH = (jnp.broadcast_to(y, (batch, *y.shape[1:])) for y in (cos_ZSH, sin_ZSH))
    x_TD = x_BSND.reshape(rows, heads * features)
    tables = [y.reshape(-1, half) for y in (cos_ZSH, sin_ZSH)]
    if rows % ROWS:
        x_TD, *tables = (jnp.pad(y, ((0, -rows % ROWS), (0, 0))) for y in (x_TD, *tables))
    blocks, table_blocks = len(x_TD) // ROWS, len(tables[0]) // ROWS
    swizzle = next(n for n in (128, 64, 32) if half * x_TD.dtype.itemsize % n == 0)
    transforms = plgpu.TilingTransform((8, swizzle // x_TD.dtype.itemsize)), plgpu.SwizzleTransform(swizzle)
    of_half = [plgpu.BlockSpec((ROWS, half), lambda n, i=i: (0, 2 * n + i), transforms=transforms) for i in range(2)]

    def kernel(x: Any, cos_ref: Any, sin_ref: Any, out: Any) -> None:
        block = jax.lax.axis_index("block")
        here, table_rows = pl.ds(block * ROWS, ROWS), pl.ds(jax.lax.rem(block, table_blocks) * ROWS, ROWS)
        cos, sin = (load(ref.at[table_rows, :], plgpu.Layout.WGMMA) for ref in (cos_ref, sin_ref))

        def with_scratch(done: Any) -> None:
            def head(indices: Any, a_ref: Any, b_ref: Any) -> None:
                n = indices[0]
                slot = jax.lax.rem(n, IN_FLIGHT)
                a, b = (plgpu.layout_cast(ref[...], plgpu.Layout.WGMMA).astype(jnp.float32) for ref in (a_ref, b_ref))
                plgpu.wait_smem_to_gmem(2 * (IN_FLIGHT - 1), wait_read_only=True)
                for i, y in enumerate((a * cos - b * sin, b * cos + a * sin)):
                    done[slot, i] = y.astype(done.dtype)
                plgpu.commit_smem()
                for i in range(2):
                    plgpu.copy_smem_to_gmem(done.at[slot, i], out.at[here, pl.ds((2 * n + i) * half, half)])

            run = plgpu.emit_pipeline(head, grid=(heads,), in_specs=of_half, max_concurrent_steps=IN_FLIGHT)
            run(x.at[here, :], x.at[here, :])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        scratch = plgpu.SMEM((IN_FLIGHT, 2, ROWS, half), x_TD.dtype, transforms=transforms)
        pl.run_scoped(with_scratch, scratch)

    y_TD = gpu_kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(x_TD.shape, x_TD.dtype),
        grid=(blocks,),
        grid_names=("block",),
        cost_estimate=pl.CostEstimate(
            flops=3 * x_TD.size,
            transcendentals=0,
            bytes_accessed=2 * x_TD.size * x_TD.dtype.itemsize + 8 * blocks * ROWS * half,
        ),
        interpret=interpret,
        kernel_name="rotary",
    )(x_TD, *tables)
    return y_TD[:rows].reshape(x_BSND.shape)
