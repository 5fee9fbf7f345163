"""Kernels that compute each row of an array from the same row of others: norms, softmax, activations.

The body is written once, for one row or a block of rows. On TPUs a program has a block of rows in VMEM. On GPUs a
program, one warpgroup, takes its rows one by one, each in registers in lines of 128 elements, while the copy engine
loads the next ones into shared memory.

Numbers, one per row, lie along lanes in the memory of a TPU: 4 bytes each, not the 512 of a column padded to 128 lanes.

Shape suffixes: T rows, M elements of a row.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from .implementation import Backend, gpu_kernel, tpu_kernel, unsupported

VMEM_BYTES = 4 * 2**20
"""Of the blocks of a TPU program, each of which is buffered twice; a core has 16 MB or more."""

ROWS = 32
"""A TPU program takes a multiple of as many rows: a tile of 8-bit elements."""

MULTIPROCESSORS = 132
"""Of an H100."""

MOST_PROGRAMS = 8
"""Of a GPU kernel on a multiprocessor, as far as its registers and shared memory take them."""

REGISTERS, SMEM_BYTES = 65_536, 227 * 2**10
"""Of a multiprocessor."""

FEW_REGISTERS = 40
"""Of a thread, beside its elements of rows."""

MOST_STEPS, BUFFER_BYTES = 4, 64 * 2**10
"""Rows that a GPU program loads ahead, and their bytes, at most."""

LANES = 128
"""Threads of a warpgroup, which share out a row; numbers in a row of a TPU's memory."""

PIECE = 1024
"""Elements of long rows that a program of an elementwise kernel takes at a time, at most."""

MOST_ROW_ELEMENTS = {"tpu": 32_768, "gpu": 16_384}
"""The longest rows: of 32 rows in VMEM, and in the registers of a warpgroup."""


class Along(NamedTuple):
    """Reductions along a row, of what broadcasts against it."""

    sum: Callable[[jax.Array], jax.Array]
    max: Callable[[jax.Array], jax.Array]
    mean: Callable[[jax.Array], jax.Array]


Body = Callable[..., tuple[Sequence[jax.Array], Sequence[jax.Array]]]
"""(rows, vectors, `Along`) -> (rows of the results, what they add to sums over rows).

Each is [..., M], in float32 or int32; numbers broadcast against it.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowKernel:
    """A kernel of rows."""

    name: str
    body: Body
    flops_per_element: int
    transcendentals_per_element: int = 0
    is_elementwise: bool = False
    """Whether the body reduces nothing along a row, so that long rows can be cut into pieces."""

    def __call__(
        self,
        rows: Sequence[jax.Array],
        vectors: Sequence[jax.Array],
        results: Sequence[jax.ShapeDtypeStruct],
        sums: Sequence[jax.ShapeDtypeStruct],
        backend: Backend,
    ) -> list[jax.Array]:
        """Runs it.

        Args:
            rows: arrays [..., M], all with the leading dims of the first, or of these dims only: a number per row.
            vectors: arrays [M], or [1], for all rows.
            results: [..., M] with the leading dims of the rows, or of these dims only.
            sums: [M] in float32, summed over all rows.
            backend: the compiler.

        Returns:
            Results and sums.
        """
        lead = rows[0].shape[:-1]
        count = math.prod(lead)
        if not count:
            return [jnp.zeros(x.shape, x.dtype) for x in (*results, *sums)]
        is_number = [x.shape == lead for x in (*rows, *results)]
        flat = [x.reshape(-1 if one else (count, x.shape[-1])) for x, one in zip(rows, is_number, strict=False)]
        shapes = [
            (count,) if one else (count, x.shape[-1]) for x, one in zip(results, is_number[len(rows) :], strict=True)
        ]
        out = [jax.ShapeDtypeStruct(shape, x.dtype) for shape, x in zip(shapes, results, strict=True)]
        run = self._on_tpu if backend.target == "tpu" else self._on_gpu
        found = run(flat, vectors, out, sums, backend.interpret)
        return [x.reshape(y.shape) for x, y in zip(found, (*results, *sums), strict=True)]

    def in_plain_jax(
        self, rows: Sequence[jax.Array], vectors: Sequence[jax.Array], results: Sequence[Any], sums: Sequence[Any]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Results and sums, as those of a call, by jnp: the body on all rows."""
        ndim = rows[0].ndim
        wide = [_wide(x if x.ndim == ndim else x[..., None]) for x in rows]
        along = Along(*(functools.partial(f, axis=-1, keepdims=True) for f in (jnp.sum, jnp.max, jnp.mean)))
        made, added = self.body(wide, [_wide(x).reshape((1,) * (ndim - 1) + x.shape) for x in vectors], along)
        found = [x.reshape(y.shape).astype(y.dtype) for x, y in zip(made, results, strict=True)]
        return found, [x.sum(tuple(range(ndim - 1))) for x, _ in zip(added, sums, strict=True)]

    def cost(self, arrays: Sequence[Any]) -> pl.CostEstimate:
        """Its FLOPs, and bytes if each array is read or written once."""
        elements = max(math.prod(x.shape) for x in arrays)
        return pl.CostEstimate(
            flops=self.flops_per_element * elements,
            transcendentals=self.transcendentals_per_element * elements,
            bytes_accessed=sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays),
        )

    def _on_tpu(self, rows: Any, vectors: Any, results: Any, sums: Any, interpret: Any) -> Sequence[jax.Array]:
        arrays = (*rows, *results)
        count, longest = rows[0].shape[0], max(x.shape[1] for x in arrays if x.ndim == 2)
        piece = min(longest, PIECE) if self.is_elementwise else longest
        row_bytes = sum(min(x.shape[1], piece) * max(x.dtype.itemsize, 4) for x in arrays if x.ndim == 2)
        block = max(ROWS, min(count, VMEM_BYTES // (2 * row_bytes)) // ROWS * ROWS)
        if any(x.ndim == 1 for x in arrays):
            block = max(n for n in (ROWS, 2 * ROWS, LANES) if n <= max(block, ROWS))
        num_rows, num_operands, num_results = len(rows), len(rows) + len(vectors), len(results)

        def kernel(*refs: Any) -> None:
            ins, outs = refs[:num_operands], refs[num_operands:]
            i = pl.program_id(1)
            row = jax.lax.broadcasted_iota(jnp.int32, (block, 1), 0)
            lane = jax.lax.broadcasted_iota(jnp.int32, (block, LANES), 1)
            is_mine = lane == row + i * block % LANES

            def read(x: Any, ref: Any) -> jax.Array:
                # The lanes of these rows, as a column.
                value = _wide(ref[...])
                return value if x.ndim == 2 else jnp.sum(jnp.where(is_mine, value, 0), axis=1, keepdims=True)

            values = [*map(read, rows, ins), *(_wide(ref[...]) for ref in ins[num_rows:])]
            along = Along(*(functools.partial(f, axis=-1, keepdims=True) for f in (jnp.sum, jnp.max, jnp.mean)))
            made, added = self.body(values[:num_rows], values[num_rows:], along)
            for out, ref, x in zip(results, outs, made, strict=False):
                if out.ndim == 2:
                    ref[...] = x.astype(ref.dtype)
                    continue
                mine = jnp.sum(jnp.where(is_mine, x, 0), axis=0, keepdims=True).astype(ref.dtype)
                is_kept = (lane[:1] < i * block % LANES) & (i * block % LANES > 0)
                ref[...] = jnp.where(is_kept, ref[...], mine)
            real = i * block + row < count
            for ref, x in zip(outs[num_results:], added, strict=True):
                part = jnp.sum(jnp.where(real, x, 0.0), axis=0, keepdims=True)
                ref[...] = jnp.where(i == 0, part, ref[...] + part)

        def blocks(x: Any) -> pl.BlockSpec:
            if x.ndim == 1:
                return pl.BlockSpec((1, LANES), lambda j, i: (0, i * block // LANES))
            return pl.BlockSpec((block, min(piece, x.shape[1])), lambda j, i: (i, j))

        def whole(x: Any) -> pl.BlockSpec:
            return pl.BlockSpec((1, min(piece, x.shape[-1])), lambda j, i: (0, j if x.shape[-1] > 1 else 0))

        def stored(x: Any) -> Any:
            return x if x.ndim == 2 else jax.ShapeDtypeStruct((1, *x.shape), x.dtype)

        is_ordered = sums or any(x.ndim == 1 for x in results)
        return tpu_kernel(
            kernel,
            grid=(pl.cdiv(longest, piece), pl.cdiv(count, block)),
            in_specs=[*map(blocks, rows), *map(whole, vectors)],
            out_specs=[*map(blocks, results), *map(whole, sums)],
            out_shape=list(map(stored, (*results, *sums))),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "arbitrary" if is_ordered else "parallel")
            ),
            cost_estimate=self.cost(arrays),
            interpret=interpret,
            name=self.name,
        )(*(x if x.ndim == 2 else x[None] for x in (*rows, *vectors)))

    def _on_gpu(self, rows: Any, vectors: Any, results: Any, sums: Any, interpret: Any) -> Sequence[jax.Array]:
        arrays = (*rows, *results)
        count, longest = rows[0].shape[0], max(x.shape[1] for x in arrays if x.ndim == 2)
        piece = _divisor(longest) if self.is_elementwise else longest
        pieces, lines = longest // piece, piece // LANES
        loaded = [n for n, x in enumerate(rows) if x.ndim == 2]
        step_bytes = sum(piece * rows[n].dtype.itemsize for n in loaded)
        steps = max(1, min(MOST_STEPS, BUFFER_BYTES // step_bytes))
        registers = lines * (len(arrays) + len(vectors) + len(sums)) + FEW_REGISTERS
        resident = max(1, min(MOST_PROGRAMS, SMEM_BYTES // (steps * step_bytes), REGISTERS // (LANES * registers)))
        per_program = pl.cdiv(count, pl.cdiv(resident * MULTIPROCESSORS, pieces))
        programs = pl.cdiv(count, per_program)
        num_rows, num_operands, num_results = len(rows), len(rows) + len(vectors), len(results)

        def kernel(*refs: Any) -> None:
            ins, outs = refs[:num_operands], refs[num_operands:]
            program = jax.lax.axis_index("program")
            own = jax.lax.axis_index("piece") if pieces > 1 else 0
            own_lines = pl.ds(own * lines, lines)
            shared = [
                _wide(ref[own_lines, :] if x.shape[0] > 1 else ref[0])
                for x, ref in zip(vectors, ins[num_rows:], strict=True)
            ]

            def row_of(k: Any) -> Any:
                return jnp.minimum(program * per_program + k, count - 1)  # the last rows are written twice

            def one(indices: Any, *refs: Any) -> tuple[jax.Array, ...]:
                (k,), totals, at = indices, refs[-1], row_of(indices[0])
                of_row = dict(zip(loaded, refs[:-1], strict=True))
                mine = [_wide(of_row[n][...] if n in of_row else ref[at]) for n, ref in enumerate(ins[:num_rows])]
                made, added = self.body(mine, shared, Along(jnp.sum, jnp.max, jnp.mean))
                for out, ref, x in zip(results, outs, made, strict=False):
                    place = at if out.ndim == 1 else (pl.ds((at * pieces + own) * lines, lines), slice(None))
                    ref[place] = x.astype(ref.dtype)
                is_real = (program * per_program + k < count).astype(jnp.float32)
                return tuple(t + x * is_real for t, x in zip(totals, added, strict=True))

            of_block = plgpu.BlockSpec((lines, LANES), lambda k: (row_of(k) * pieces + own, 0))
            totals = plgpu.emit_pipeline(
                one,
                grid=(per_program,),
                in_specs=[of_block] * len(loaded),
                max_concurrent_steps=steps,
                init_carry=tuple(jnp.zeros((lines, LANES), jnp.float32) for _ in sums),
            )(*(ins[n] for n in loaded))
            for ref, x in zip(outs[num_results:], totals, strict=True):
                ref[program, own_lines, :] = x

        def in_lines(x: Any) -> Any:
            return x if x.ndim == 1 else x.reshape(-1, LANES)

        parts = [jax.ShapeDtypeStruct((programs, longest // LANES, LANES), jnp.float32) for _ in sums]
        stored = [
            x if x.ndim == 1 else jax.ShapeDtypeStruct((count * longest // LANES, LANES), x.dtype) for x in results
        ]
        found = gpu_kernel(
            kernel,
            out_type=[*stored, *parts],
            grid=(programs, pieces) if pieces > 1 else (programs,),
            grid_names=("program", "piece") if pieces > 1 else ("program",),
            cost_estimate=self.cost(arrays),
            interpret=interpret,
            kernel_name=self.name,
        )(*map(in_lines, rows), *(x.reshape(-1, LANES) if x.shape[0] > 1 else x for x in vectors))
        made = [x.reshape(y.shape) for x, y in zip(found, results, strict=False)]
        return [*made, *(x.sum(0).reshape(-1) for x in found[num_results:])]


def obstacle(implementation: str, rows: Sequence[Any], *, is_elementwise: bool = False) -> str:
    """Why a compiler can't run a kernel of rows, or an empty text."""
    if missing := unsupported(implementation):
        return missing
    target = "gpu" if implementation == "mosaic_gpu" else "tpu"
    longest = max(x.shape[-1] for x in rows)
    if any(jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize not in (2, 4) for x in rows):
        return "arrays of 16 or 32 bits"
    if target == "gpu" and any(x.shape[-1] % LANES for x in rows):
        return f"rows of a multiple of {LANES} elements"
    if longest > MOST_ROW_ELEMENTS[target] and not is_elementwise:
        return f"rows of at most {MOST_ROW_ELEMENTS[target]:,} elements"
    return ""


def _divisor(elements: int) -> int:
    """The longest piece of a row, of a multiple of `LANES` elements."""
    return max(n for n in range(LANES, min(elements, PIECE) + 1, LANES) if elements % n == 0)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int32)
