"""What a kernel of a GPU takes, as XLA's cost model has it: what it computes, what it reads and how often.

After openxla/xla, `service/gpu/model/gpu_hlo_cost_analysis.cc`, `gpu_performance_model_base.cc` and
`backends/gpu/codegen/emitters/reduction.cc`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from .. import compat
from ..cost.gpu_arithmetic import arithmetic_us, cycles, kernel_us, read_us
from ..cost.gpu_latencies import BYTES_PER_US
from .dim_orders import stored_order
from .instruction import Instruction
from .primitive_traits import REDUCTIONS, updates

LEAST_REDUCED = 16
"""Elements from which on the kernel of a reduction computes no other."""
THREADS, WARP, MOST_THREADS = 256, 32, 1024
"""Of a block that reduces short rows; those that run together; most of a block."""
MOST_IN_ROW, MOST_IN_COLUMN = 2**14, 2**12
"""Elements that one block sums; more are summed in two steps."""
LOOP_ELEMENTS = 512
"""That one block of threads computes."""
PARTS = frozenset({"dynamic_slice", "gather", "slice", "split"})
"""What reads a part of its first operand."""
CONCATENATED_CYCLES = 6
"""Per element, to find the operand."""

Source = Instruction | str
"""An array that a kernel reads, or a constant."""
Reads = Mapping[Source, Mapping[Source, float]]
"""What a kernel reads -> how often it reads each element, for each op that reads it element by element: those that do
so for one result read it once."""


@dataclass(slots=True, eq=False)
class KernelCost:
    """A kernel: its root and the producers that it computes."""

    root: Instruction
    cycles: float
    blocks: int
    """Of threads."""
    is_reduction: bool
    """Whether its root is a reduction, or elementwise after one."""
    reduces: bool
    """Whether it computes a reduction of many elements."""
    reads: Reads
    is_of_rows: bool = False
    """Whether blocks of threads have whole rows, so that it computes reductions of them, and with the results."""
    memory_us: float = -1.0
    """The time of its reads and of its write; negative: not summed up yet."""

    def __post_init__(self) -> None:
        if self.memory_us < 0:
            reads = sum([self.read_us(x, sum(roots.values())) for x, roots in self.reads.items()])
            self.memory_us = _written_bytes(self.root) / BYTES_PER_US + reads

    @classmethod
    def of(cls, one: Instruction) -> KernelCost:
        """That of an instruction alone."""
        is_reduction = one.name in REDUCTIONS
        size = sum(x.num_elements for x in one.operands) if is_reduction else one.num_elements
        return cls(
            root=one,
            cycles=_cycles(one) * size,
            blocks=max(1, _reduction_blocks(one) if is_reduction else math.ceil(size / LOOP_ELEMENTS)),
            is_reduction=is_reduction,
            reduces=is_reduction and size >= LEAST_REDUCED * one.num_elements,
            reads=_reads(one),
        )

    def with_producer(self, producer: KernelCost) -> KernelCost:
        """That of the kernel if it computes a producer, too."""
        reads = {x: roots for x, roots in self.reads.items() if x is not producer.root}
        return KernelCost(
            root=self.root,
            cycles=self.cycles_with(producer),
            blocks=producer.blocks if producer.is_reduction else self.blocks,
            is_reduction=self.is_reduction or producer.is_reduction,
            reduces=self.reduces or producer.reduces,
            reads=reads | {x: self.joined_reads(producer, x) for x in producer.reads},
            is_of_rows=self.is_of_rows or producer.is_of_rows,
            memory_us=-1.0 if producer.is_reduction else self.memory_us_with(producer),
        )

    def with_rows(self, producer: KernelCost) -> KernelCost:
        """That of the kernel if blocks of threads have whole rows, and so compute and read everything once."""
        found = self.with_producer(producer)
        sizes = self.root.num_elements, self.num_rows
        once: Mapping[Source, float] = {self.root: 1.0}
        reads: Reads = {
            x: once if isinstance(x, Instruction) and x.num_elements in sizes else roots
            for x, roots in found.reads.items()
        }
        return KernelCost(self.root, self.cycles + producer.cycles, self.blocks, False, False, reads, is_of_rows=True)

    @property
    def num_rows(self) -> int:
        """Of its result."""
        return self.root.num_elements // self.root.shape[-1] if self.root.shape else 1

    def cycles_with(self, producer: KernelCost) -> float:
        """The cycles if it computes a producer, too, as often as it reads each of its elements."""
        return self.cycles + producer.cycles * sum(self.reads[producer.root].values())

    def joined_reads(self, producer: KernelCost, x: Source) -> Mapping[Source, float]:
        """How often it reads an operand of a producer if it computes that, too."""
        outer = self.reads[producer.root]
        times = sum(outer.values())
        roots = dict(self.reads.get(x, ()))
        for root, count in producer.reads[x].items():
            if root is producer.root:
                roots |= outer
            else:
                roots[root] = roots.get(root, 0.0) + count * times
        return roots

    @property
    def us(self) -> float:
        """Its time in microseconds."""
        return kernel_us(arithmetic_us(self.cycles, self.blocks), self.memory_us)

    def us_with(self, producer: KernelCost, *, stores: bool = False) -> float:
        """Its time if it computes a producer, too.

        Args:
            stores: whether it also writes what the producer makes.
        """
        if producer.is_reduction:  # which changes the blocks of threads
            return self.with_producer(producer).us
        memory = self.memory_us_with(producer) + (_written_bytes(producer.root) / BYTES_PER_US if stores else 0.0)
        return kernel_us(arithmetic_us(self.cycles_with(producer), self.blocks), memory)

    def memory_us_with(self, producer: KernelCost) -> float:
        """The time of its reads and its write if as many blocks of threads compute a producer, too."""
        outer = self.reads[producer.root]
        times = sum(outer.values())
        found = self.memory_us - self.read_us(producer.root, times)
        for x, inner in producer.reads.items():
            if x in self.reads:
                joined = sum(self.joined_reads(producer, x).values())
                found += self.read_us(x, joined) - self.read_us(x, sum(self.reads[x].values()))
            else:
                found += self.read_us(x, times * sum(inner.values()))
        return found

    def read_us(self, x: Source, times: float) -> float:
        """The time to read an array so often."""
        size = x.num_bytes if isinstance(x, Instruction) else self.root.itemsize
        return read_us(times * size, size, self.blocks)


def _reads(one: Instruction) -> Reads:
    found: dict[Source, dict[Source, float]] = {}
    keeps_elements = one.elementwise or one.name == "transpose"  # often another layout
    for x in one.operands:
        if keeps_elements and x.num_elements == one.num_elements:
            found.setdefault(x, {})[one] = 1.0
        else:
            roots = found.setdefault(x, {})
            roots[x] = roots.get(x, 0.0) + _share(one, x)
    if one.elementwise and one.eqn is not None:
        constants = (f"{a.val}" for a in one.eqn.invars if compat.is_literal(a))
        found |= {constant: {constant: float(one.num_elements)} for constant in constants}
    return found


def _share(one: Instruction, x: Instruction) -> float:
    """How often an op reads each element of an operand that is not element by element its own."""
    is_part = one.name in PARTS and x is one.operands[0]
    if is_part or one.elementwise or one.name == "broadcast_in_dim":
        return one.num_elements / max(1, x.num_elements)
    return 1.0


def _written_bytes(one: Instruction) -> int:
    return one.operands[1].num_bytes if updates(one.name) and len(one.operands) > 1 else one.num_bytes


def _cycles(one: Instruction) -> int:
    """Per element of what it computes, or reduces."""
    dtype = {2: "bfloat16", 8: "float64"}.get(int(one.itemsize), "float32")
    if one.eqn is not None and one.eqn.invars:
        dtype = one.eqn.invars[-1].aval.dtype
    if one.name in REDUCTIONS:
        return cycles("add" if one.name == "reduce_sum" else "max", dtype)
    if one.name == "integer_pow" and one.eqn is not None:
        return cycles("mul", dtype) * max(1, abs(one.eqn.params["y"]).bit_length())
    if one.name == "concatenate":
        return CONCATENATED_CYCLES
    return cycles(one.name, dtype) if one.elementwise and one.operands else 0


def _reduction_blocks(one: Instruction) -> int:
    """How many blocks of threads run a reduction."""
    dims = stored_dims(one)
    if len(one.operands) != 1 or not any(is_reduced for _, is_reduced in dims):
        return math.ceil(sum(x.num_elements for x in one.operands) / LOOP_ELEMENTS)
    (x,) = one.operands
    minor, is_row = innermost(dims)
    if is_row:
        kept = math.prod(size for size, is_reduced in dims if not is_reduced)
        if minor > MOST_IN_ROW:
            kept, minor = kept * math.isqrt(minor), math.isqrt(minor)
        threads = min(MOST_THREADS, WARP * math.ceil(minor / WARP**2))
        return math.ceil(kept / max(1, THREADS // threads))
    reduced, _ = innermost(dims)
    kept = math.prod(size for size, is_reduced in dims if not is_reduced)
    if reduced > MOST_IN_COLUMN:
        kept *= math.isqrt(reduced)
    if WARP % minor == 0:
        return kept
    vector = next((n for n in ((4, 2) if x.itemsize < 4 else (2,)) if minor % n == 0 and n * WARP <= minor), 1)
    return kept * math.ceil(minor / (WARP * vector))


def stored_dims(one: Instruction) -> list[tuple[int, bool]]:
    """The sizes of what a reduction reads in the order in which they are stored, and whether they are reduced."""
    (x, *_), axes = one.operands, one.eqn.params.get("axes", ()) if one.eqn is not None else ()
    return [(x.shape[d], d in axes) for d in stored_order(x) if x.shape[d] > 1]


def innermost(dims: list[tuple[int, bool]]) -> tuple[int, bool]:
    """Removes the last dims that are all reduced, or all kept; returns their elements and which of both it is.

    Args:
        dims: sizes, and whether they are reduced, of one dim or more.
    """
    found, is_reduced = 1, bool(dims) and dims[-1][1]
    while dims and dims[-1][1] == is_reduced:
        found *= dims.pop()[0]
    return found, is_reduced
