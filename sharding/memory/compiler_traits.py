"""What each platform's compiler stores, where they differ: one record per platform."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from .. import compat
from ..hardware import Platform
from ..rules.rule_table import TRANSCENDENTAL

RANDOM_BITS = frozenset({"threefry2x32", "threefry4x32"})

Schedule = Literal["breadth first", "latency hiding", "least memory"]
"""See `kernel_order`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilerTraits:
    """How one compiler's buffers differ from the program's arrays."""

    widens_16_bits: bool = False
    """Whether arithmetic, dots and collectives of 16-bit floats run in 32 bits."""
    multiplies_16_bits: bool = True
    """Whether dots of 16-bit floats don't, unless their left operand is transposed."""
    multiplies_mixed: bool = False
    """Whether products read operands of two types as they are, unless one is complex."""
    uses_library: bool = False
    """Whether a library runs dots and convolutions, their operands transposed to its order, and large reductions with
    the elementwise ops around them, a loop computes random bits, and what a scatter updates is copied as soon as it is
    there; others choose layouts so that no transpose is needed."""
    uses_cudnn: bool = False
    """Whether cuDNN runs convolutions."""
    reduces_in_place: bool = True
    """Whether an all-reduce writes into its operand's buffer, and a reduce-scatter stores only its result; otherwise it
    is an all-reduce and a slice."""
    reuses_results: bool = True
    """Whether the buffer of a result holds temporaries before the result."""
    gathers_leading_dim: bool = False
    """Whether an all-gather concatenates shards along the leading dim; arrays gathered along another are transposed."""
    combines_all: bool = False
    """Whether all-gathers and reduce-scatters are combined as all-reduces are."""
    stored_once: frozenset[str] = RANDOM_BITS | {"gather"}
    """Primitives that are stored rather than computed in each of several consumers."""
    most_reduced_elements: float = math.inf
    """The elements of a matrix and a vector, per batch, from which on their product is no reduction."""
    block_elements: int = 0
    """How many elements one block of threads reduces to one: what it reads is stored, as it would compute it slowly."""
    fuses_by_cost: bool = False
    """Whether kernels compute what they read if the compiler's cost model finds that faster: see `priority_fusion`."""
    chooses_layouts: bool = False
    """Whether elementwise ops run in the layout of their operands, so that no kernel transposes what all of these
    have in common."""
    schedule: Schedule = "least memory"
    """The order of the kernels."""
    rounds_early: bool = False
    """Whether float32 values that are only read in bfloat16 are stored so, and products that are only read in float32
    are stored before they are rounded."""
    fuses_into_products: bool = False
    """Whether the kernels of products and convolutions compute their operands, and what follows them."""
    fuses_into_scatters: bool = False
    """Whether the kernels of scatters compute what they add, and where."""
    fuses_around_products: bool = False
    """Whether the kernels of products compute operands that need no more reads, and what follows; TPUs do more."""
    merges_sums: bool = False
    """Whether partial sums that are all-reduced and added are added first."""
    scatters_sums: bool = False
    """Whether all-reduces of which each device keeps a part are reduce-scatters."""
    sums_slices: bool = False
    """Whether reduce-scatters over all devices are all-reduces, of which each reader takes a part."""
    reshapes_products: bool = False
    """Whether products are of matrices, or stacks of them, and gathers keep dims of size 1, other dims are bitcasts."""
    transposes_operands: bool = False
    """Whether products read stacks of matrices, to which arguments of the program are transposed."""
    slices_products: bool = False
    """Whether products of which a slice is read compute only that."""
    merges_products: bool = False
    """Whether products that share an operand are slices of one."""
    stores_tiles: bool = False
    """Whether arrays are stored in tiles."""
    sinks_broadcasts: bool = False
    """Whether loops compute masks and other broadcasts themselves in each iteration: see `loop_sinking`."""
    moves_alone: bool = False
    """Whether no other op runs in the kernels of gathers of several rows and of pads between elements."""
    stores_parts: bool = False
    """Whether arrays are stored of which kernels read or write parts, and what reductions make: see `fusion`."""
    keeps_several: bool = False
    """Whether no kernel writes over one of several results of another one."""
    copies_moved_results: bool = False
    """Whether results of a program that other devices write are copied in the end: see `moved_results`."""
    packs_online: bool = False
    """Whether buffers are placed in memory in the order of the schedule, not the largest first, and small arrays in
    memory of their own: see `vector_memory`."""
    fuses_windows: bool = False
    """Whether kernels compute sums of windows, and cumulative ones."""


DEFAULT = CompilerTraits()
"""Of a compiler that does nothing special."""

TRAITS: Mapping[Platform, CompilerTraits] = {
    "cpu": CompilerTraits(
        widens_16_bits=True,
        multiplies_16_bits=compat.MULTIPLIES_16_BITS,
        uses_library=True,
        reduces_in_place=False,
        gathers_leading_dim=True,
        stored_once=TRANSCENDENTAL,
        schedule="breadth first",
    ),
    "tpu": CompilerTraits(
        reuses_results=False,
        sums_slices=True,
        multiplies_mixed=True,
        rounds_early=True,
        merges_sums=True,
        slices_products=True,
        fuses_into_products=True,
        sinks_broadcasts=True,
        stores_tiles=True,
        moves_alone=True,
        stores_parts=True,
        keeps_several=True,
        copies_moved_results=True,
        packs_online=True,
    ),
    "gpu": CompilerTraits(
        uses_cudnn=True,
        keeps_several=True,
        fuses_into_scatters=True,
        fuses_windows=True,
        stored_once=RANDOM_BITS,
        combines_all=True,
        most_reduced_elements=10_000_000,
        block_elements=2**14,
        fuses_by_cost=True,
        chooses_layouts=True,
        schedule="latency hiding",
        reshapes_products=True,
        transposes_operands=True,
        merges_products=True,
        merges_sums=True,
        slices_products=True,
        scatters_sums=True,
        fuses_around_products=True,
    ),
}
