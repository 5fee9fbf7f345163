"""The compiled form of a logical collective on each backend: its kind, wire dtype and bytes.

Each logical collective compiles to one. Where a compiler emits an all-reduce and a slice for a reduce-scatter, the
slice moves nothing.

- XLA:CPU computes narrow floats in wider ones and also sends them so (its `FloatNormalization` and
  `AllReducePromotion`), even in collectives without arithmetic. A reduce-scatter by the partitioner is an all-reduce
  and a slice; only a `psum_scatter` under `shard_map` is a reduce-scatter.
- XLA:TPU reduces f32, bf16 and 32-bit integers natively, and everything narrower as whole rows of 32-bit words. It
  reduce-scatters f32 and bf16 only; other types are all-reduced and sliced. Its `all-reduce-scatter` fusions are
  reduce-scatters. Those by the partitioner of vectors, or into shards that are not whole tiles, are all-reduced and
  sliced; so are all over every device of a slice of eight or more, even a `psum_scatter` (not those of a 2x4 slice,
  which is not modelled). Vectors whose shards don't fill the 128 lanes are gathered by an all-reduce of padded shards,
  and so is everything over all devices of a slice of 64 or more: with links in three dims of any size, with links in
  two dims up to 16 MiB.
- XLA:GPU reduces 16-bit integers in 32 bits (`AllReducePromotion` in
  https://github.com/openxla/xla/blob/main/xla/service/gpu/gpu_compiler.cc) and passes the rest to NCCL unchanged, which
  cannot reduce some narrow floats.

The tests compile each row: XLA:CPU's on every release; XLA:TPU's by libtpu (0.0.51: v5e, v5p, v6e) and XLA:GPU's by
`jax[cuda13]` (0.12.0.1: H100) where those are installed. Types narrower than a byte are not in the table.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sharding.hardware import Platform

from .collective_ops import KINDS, SUMS, Kind


class Lowered(NamedTuple):
    """A compiled collective."""

    kind: Kind
    dtype: str
    num_bytes: int


def lower_collective(
    backend: Platform,
    kind: Kind,
    dtype: str,
    num_bytes: int,
    *,
    is_manual: bool = False,
    spans_slice: bool = False,
    gathers_by_sum: bool = False,
) -> Lowered:
    """The collective that a backend's compiler emits for a logical one.

    Args:
        backend: the platform compiled for.
        kind: of the logical collective.
        dtype: of its array, by JAX's name.
        num_bytes: of one device's result at that dtype; for a reduce-scatter of its operand. Likewise in the return.
        is_manual: whether it is written in a `shard_map` rather than inserted by the partitioner.
        spans_slice: whether it is over all devices, and those are at least `CUBE`.
        gathers_by_sum: whether it is over all devices of a large slice, as `is_gathered_by_sum` has it.
    """
    wire_dtype, times = _WIRE_TYPES[backend].get((kind, dtype), (dtype, 1))
    sliced = kind == "reduce-scatter" and _is_all_reduce_and_slice(backend, dtype, is_manual, spans_slice)
    gathered = kind == "all-gather" and backend == "tpu" and gathers_by_sum
    num_bytes *= times
    if backend == "tpu" and wire_dtype != dtype:
        num_bytes = _round_up(num_bytes, WORD if num_bytes <= WORD // 2 else WORD * LANES)
    return Lowered("all-reduce" if sliced or gathered else kind, wire_dtype, num_bytes)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


WORD = 4
"""Bytes of the words that a TPU reduces."""
LANES = 128
"""Elements per row of a TPU's vector registers."""

CUBE = 8
"""Devices of the smallest TPU slice in three dimensions, over all of which nothing is reduce-scattered."""
LARGE_SLICE, PLANE_BYTES = 64, 2**24
"""Devices of the smallest TPU slice over all of which arrays are gathered by an all-reduce, and the most bytes of those
arrays if its links are in two dims. Measured (libtpu 0.0.52)."""
SUBLANES = 8
"""Rows of a TPU's vector registers."""

SCATTER_BYTES = (1_850_000, 15_000_000)
"""The least and most bytes in vector memory of a block of rows that is reduce-scattered along the lanes: of the block
and four of its shards, as 32-bit words. Measured (libtpu 0.0.52, 2 to 8 devices) to 4 % and 1 %."""


def is_slice_wide(num_devices: int, all_devices: int) -> bool:
    """Whether a collective is over all devices, and those are at least `CUBE`."""
    return CUBE <= num_devices == all_devices


def is_gathered_by_sum(num_devices: int, all_devices: int, torus_dims: int, num_bytes: float) -> bool:
    """Whether an all-gather is over all devices of a large TPU slice, whose compiler makes it an all-reduce.

    Args:
        num_devices: gathered from.
        all_devices: of the slice.
        torus_dims: dims of its links; 0 if unknown.
        num_bytes: of one device's result.
    """
    is_small = torus_dims == 2 and num_bytes <= PLANE_BYTES
    return LARGE_SLICE <= num_devices == all_devices and (torus_dims == 3 or is_small)


def is_gathered_by_all_reduce(backend: Platform, shape: Sequence[int], num_devices: int) -> bool:
    """Whether an all-gather becomes an all-reduce of shards that are padded with zeros.

    Args:
        backend: the platform compiled for. Only the TPU's compiler does, for vectors whose shards don't fill the lanes.
        shape: of one device's result.
        num_devices: gathered from.
    """
    size = math.prod(shape)
    return backend == "tpu" and size == max(shape, default=1) and size // num_devices % LANES > 0


def is_scattered_by_all_reduce(
    backend: Platform, shape: Sequence[int], dim: int, parts: int, itemsize: int, tile: tuple[int, int] | None = None
) -> bool:
    """Whether a reduce-scatter by the partitioner becomes an all-reduce and a slice.

    The TPU's compiler tiles two dims of an array, and orders the others as they are. It reduce-scatters along the major
    dim, and along one of a tile only if each shard has whole tiles of 32-bit words; along the rows of a matrix, if it
    has a row of tiles; vectors never. Along the lanes it goes through the rows in equal blocks, which a large matrix
    whose number of rows has a large prime factor, such as a vocabulary of 151,936 words, has none of.

    Args:
        backend: the platform compiled for.
        shape: of one device's operand.
        dim: the scattered dim.
        parts: the number of devices that it is scattered over.
        itemsize: bytes per element.
        tile: the dims along lanes and rows that the op prefers, by default the last two.
    """
    if backend != "tpu" or shape[dim] == 0:
        return False
    if math.prod(shape) == shape[dim]:
        return True
    shard = [-(-n // parts) if d == dim else n for d, n in enumerate(shape)]
    packed = max(1, WORD // itemsize)
    lane, row = _minor_dims(shape, shard, tile)
    if dim == lane:
        rows = math.prod(shape) // shape[dim]
        return shard[dim] % (LANES * packed) > 0 or not _is_cut_evenly(rows, shape[dim], parts)
    majors = [d for d, n in enumerate(shape) if n > 1 and d not in (lane, row)]
    if dim != row:
        return dim != majors[0]
    return shard[dim] % (SUBLANES * packed) > 0 if majors else shard[dim] < SUBLANES


def _is_cut_evenly(rows: int, lanes: int, parts: int) -> bool:
    """Whether a matrix is scattered along its lanes in equal blocks of rows of a good size."""
    tiles = -(-rows // SUBLANES)
    row_bytes = WORD * SUBLANES * (lanes + 4 * lanes // parts)
    if tiles * row_bytes <= SCATTER_BYTES[1]:
        return True
    sizes = (d for k in range(1, math.isqrt(tiles) + 1) if tiles % k == 0 for d in (k, tiles // k))
    return any(SCATTER_BYTES[0] <= d * row_bytes <= SCATTER_BYTES[1] for d in sizes)


def _minor_dims(shape: Sequence[int], shard: Sequence[int], tile: tuple[int, int] | None) -> tuple[int, int]:
    """The dims along the lanes and rows of tiles: those that need the least padding, else those preferred."""

    def padding(dims: tuple[int, int]) -> float:
        (lane, row) = dims
        return _round_up(shard[lane], LANES) / shard[lane] * _round_up(shape[row], SUBLANES) / shape[row]

    pairs = itertools.permutations(range(len(shape) - 1, -1, -1), 2)
    return min([tile, *pairs] if tile else pairs, key=padding)


def _is_all_reduce_and_slice(backend: Platform, dtype: str, is_manual: bool, spans_slice: bool) -> bool:
    """Whether a reduce-scatter becomes an all-reduce and a slice."""
    if backend == "cpu":
        return not is_manual
    return backend == "tpu" and (spans_slice or dtype not in ("float32", "bfloat16"))


WireTypes = Mapping[tuple[Kind, str], tuple[str, int]]
"""Kind and dtype -> the dtype it is sent in, and the factor by which its bytes grow."""

_INTEGERS = ("int8", "uint8", "int16", "uint16")
_FLOAT8 = tuple(f"float8_{form}" for form in ("e4m3fn", "e5m2", "e4m3", "e3m4", "e4m3fnuz", "e5m2fnuz", "e4m3b11fnuz"))

_CPU_WIRE_TYPES: dict[str, tuple[str, int]] = {
    "bfloat16": ("float32", 2),
    **dict.fromkeys(_FLOAT8, ("float16", 2)),
    "float8_e8m0fnu": ("float32", 4),
}

_WIRE_TYPES: dict[Platform, WireTypes] = {
    "cpu": {(kind, dtype): wire_dtype for kind in KINDS for dtype, wire_dtype in _CPU_WIRE_TYPES.items()},
    "tpu": {(kind, dtype): ("uint32", 1) for kind in SUMS for dtype in ("float16", "bool", *_INTEGERS, *_FLOAT8)},
    "gpu": {(kind, f"{sign}int16"): (f"{sign}int32", 2) for kind in SUMS for sign in ("", "u")},
}
