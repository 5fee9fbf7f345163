"""Kernels that compute each row of an array from the same row of others: norms, softmax, activations.

The body is written once, for one row or a block of rows. On TPUs a program has a block of rows in VMEM. On GPUs a
program, one warpgroup, takes its rows one by one, each as a vector in registers, so that a row is read once and in
order.

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

from .implementation import Backend, unsupported

VMEM_BYTES = 4 * 2**20
"""Of the blocks of a TPU program, each of which is buffered twice; a core has 16 MB or more."""

ROWS = 32
"""A TPU program takes a multiple of as many rows: a tile of 8-bit elements."""

GPU_PROGRAMS = 1056
"""Programs of a GPU kernel: 8 for each of the 132 multiprocessors of an H100."""

LANES = 128
"""Threads of a warpgroup, which share out a row."""

MOST_ROW_ELEMENTS = {"tpu": 32_768, "gpu": 16_384}
"""The longest rows: of 32 rows in VMEM, and in the registers of a warpgroup."""


class Along(NamedTuple):
    """Reductions along a row, of what broadcasts against it."""

    sum: Callable[[jax.Array], jax.Array]
    max: Callable[[jax.Array], jax.Array]


Body = Callable[..., tuple[Sequence[jax.Array], Sequence[jax.Array]]]
"""(rows, vectors, `Along`) -> (rows of the results, what they add to sums over rows).

Each is [..., M], in float32 or int32.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowKernel:
    """A kernel of rows."""

    name: str
    body: Body
    flops_per_element: int
    transcendentals_per_element: int = 0

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
            rows: arrays [..., M], all with the same leading dims.
            vectors: arrays [M], for all rows.
            results: [..., M] with the leading dims of the rows.
            sums: [M] in float32, summed over all rows.
            backend: the compiler.

        Returns:
            Results and sums.
        """
        lead = rows[0].shape[:-1]
        count = math.prod(lead)
        if not count:
            return [jnp.zeros(x.shape, x.dtype) for x in (*results, *sums)]
        flat = [x.reshape(count, x.shape[-1]) for x in rows]
        out = [jax.ShapeDtypeStruct((count, x.shape[-1]), x.dtype) for x in results]
        run = self._on_tpu if backend.target == "tpu" else self._on_gpu
        found = run(flat, vectors, out, sums, backend.interpret)
        return [x.reshape(y.shape) for x, y in zip(found, (*results, *sums), strict=True)]

    def cost(self, arrays: Sequence[Any]) -> pl.CostEstimate:
        """Its FLOPs, and bytes if each array is read or written once."""
        elements = max(math.prod(x.shape) for x in arrays)
        return pl.CostEstimate(
            flops=self.flops_per_element * elements,
            transcendentals=self.transcendentals_per_element * elements,
            bytes_accessed=sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays),
        )

    def _on_tpu(self, rows: Any, vectors: Any, results: Any, sums: Any, interpret: Any) -> Sequence[jax.Array]:
        count, num_rows, num_results = rows[0].shape[0], len(rows), len(results)
        arrays = (*rows, *results)
        row_bytes = sum(x.shape[1] * max(x.dtype.itemsize, 4) for x in arrays)
        block = max(ROWS, min(count, VMEM_BYTES // (2 * row_bytes)) // ROWS * ROWS)

        def kernel(*refs: Any) -> None:
            ins, outs = refs[: num_rows + len(vectors)], refs[num_rows + len(vectors) :]
            values = [_wide(ref[...]) for ref in ins]
            along = Along(*(functools.partial(f, axis=-1, keepdims=True) for f in (jnp.sum, jnp.max)))
            made, added = self.body(values[:num_rows], values[num_rows:], along)
            for ref, x in zip(outs, made, strict=False):
                ref[...] = x.astype(ref.dtype)
            first = pl.program_id(0) == 0
            real = pl.program_id(0) * block + jax.lax.broadcasted_iota(jnp.int32, (block, 1), 0) < count
            for ref, x in zip(outs[num_results:], added, strict=True):
                part = jnp.sum(jnp.where(real, x, 0.0), axis=0, keepdims=True)
                ref[...] = jnp.where(first, part, ref[...] + part)

        def blocks(x: Any) -> pl.BlockSpec:
            return pl.BlockSpec((block, x.shape[1]), lambda i: (i, 0))

        def whole(x: Any) -> pl.BlockSpec:
            return pl.BlockSpec((1, x.shape[-1]), lambda i: (0, 0))

        order = "arbitrary" if sums else "parallel"
        found = pl.pallas_call(
            kernel,
            grid=(pl.cdiv(count, block),),
            in_specs=[*map(blocks, rows), *map(whole, vectors)],
            out_specs=[*map(blocks, results), *map(whole, sums)],
            out_shape=[*results, *(jax.ShapeDtypeStruct((1, *x.shape), x.dtype) for x in sums)],
            compiler_params=pltpu.CompilerParams(dimension_semantics=(order,)),
            cost_estimate=self.cost(arrays),
            interpret=interpret,
            name=self.name,
        )(*rows, *(x[None] for x in vectors))
        return found

    def _on_gpu(self, rows: Any, vectors: Any, results: Any, sums: Any, interpret: Any) -> Sequence[jax.Array]:
        count, num_rows, num_results = rows[0].shape[0], len(rows), len(results)
        per_program = pl.cdiv(count, GPU_PROGRAMS)
        programs = pl.cdiv(count, per_program)

        def kernel(*refs: Any) -> None:
            ins, outs = refs[: num_rows + len(vectors)], refs[num_rows + len(vectors) :]
            program = jax.lax.axis_index("program")
            shared = [_wide(ref[...]) for ref in ins[num_rows:]]

            def one(k: jax.Array, totals: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                row = program * per_program + k
                at = jnp.minimum(row, count - 1)  # the last rows of the last program are written twice
                made, added = self.body([_wide(ref[at]) for ref in ins[:num_rows]], shared, Along(jnp.sum, jnp.max))
                for ref, x in zip(outs, made, strict=False):
                    ref[at] = x.astype(ref.dtype)
                is_real = (row < count).astype(jnp.float32)
                return tuple(t + x * is_real for t, x in zip(totals, added, strict=True))

            start = tuple(jnp.zeros(x.shape, jnp.float32) for x in sums)
            for ref, x in zip(outs[num_results:], jax.lax.fori_loop(0, per_program, one, start), strict=True):
                ref[program] = x

        parts = [jax.ShapeDtypeStruct((programs, *x.shape), jnp.float32) for x in sums]
        found = plgpu.kernel(
            kernel,
            out_type=[*results, *parts],
            grid=(programs,),
            grid_names=("program",),
            cost_estimate=self.cost((*rows, *results)),
            interpret=interpret,
            kernel_name=self.name,
        )(*rows, *vectors)
        return [*found[:num_results], *(x.sum(0) for x in found[num_results:])]


def obstacle(implementation: str, rows: Sequence[Any]) -> str:
    """Why a compiler can't run a kernel of rows, or an empty text."""
    if missing := unsupported(implementation):
        return missing
    target = "gpu" if implementation == "mosaic_gpu" else "tpu"
    longest = max(x.shape[-1] for x in rows)
    if any(jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize not in (2, 4) for x in rows):
        return "arrays of 16 or 32 bits"
    if target == "gpu" and any(x.shape[-1] % LANES for x in rows):
        return f"rows of a multiple of {LANES} elements"
    if longest > MOST_ROW_ELEMENTS[target]:
        return f"rows of at most {MOST_ROW_ELEMENTS[target]:,} elements"
    return ""


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int32)
