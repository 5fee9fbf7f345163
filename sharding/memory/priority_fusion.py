"""What XLA:GPU stores, by its cost model (openxla/xla, `backends/gpu/transforms/priority_fusion.cc`).

The producer that saves most time is computed by all that read it, again and again until none saves any. Ops that are
computed several times, sums of columns by few blocks of threads, and constants that each element reads make that slower
than a kernel that stores the producer.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence

from ..cost.gpu_arithmetic import LAUNCH_US
from .instruction import Instruction, users
from .kernel_cost import KernelCost
from .primitive_traits import REDUCTIONS

MOST_OPERANDS = 96
"""Of one kernel."""
MOST_IN_REGISTERS = int(0.4 * 2**16)
"""Elements of a row, rounded up to a power of two, that one block of threads holds."""


class PriorityFusion:
    """Decides which instructions of a body are stored.

    Args:
        instructions: operands before their users.
        stored: those that are in any case.
    """

    def __init__(self, instructions: Sequence[Instruction], stored: Collection[Instruction]):
        self.place = {one: k for k, one in enumerate(instructions)}
        self.kept = stored
        self.readers = {one: dict.fromkeys(found) for one, found in users(instructions).items()}
        """Array -> the roots of the kernels that read it."""
        self.kernels = {one: KernelCost.of(one) for one in instructions if one.computes_operands}
        self.savings: dict[Instruction, dict[Instruction, float | None]] = {}
        """Producer -> reader -> microseconds that it saves to compute the one in the kernel of the other; None where
        that is impossible."""
        self.totals: dict[Instruction, tuple[float, int]] = {}
        """Producer -> the sum of these, and the number of readers that can't compute it."""
        self.saved: dict[Instruction, float] = {}
        """Producer that waits -> microseconds that it saves in all."""
        self.waiting: list[tuple[float, int, Instruction]] = []
        self.fused: set[Instruction] = set()
        self.rows_of: dict[Instruction, Instruction] = {}
        """Op on an array and reductions of its rows -> the array."""

    def stored(self) -> set[Instruction]:
        """The instructions that have kernels of their own, which are computed inside no other."""
        for one in [*self.kernels]:
            if one.elementwise and one.shape and 1 << (one.shape[-1] - 1).bit_length() <= MOST_IN_REGISTERS:
                self.normalize(one)
        for one in sorted(self.kernels, key=self.place.__getitem__, reverse=True):
            if one.role == "bitcast" and one not in self.kept:
                self.view(one)
        for one in self.kernels:
            self.weigh(one)
        while self.waiting:
            saved, _, one = heapq.heappop(self.waiting)
            if self.saved.get(one) == -saved:
                self.fuse(one)
        return self.place.keys() - self.fused

    def normalize(self, one: Instruction) -> None:
        """Computes an op on an array and reductions of its rows in one kernel, as of a softmax or a norm (openxla/xla,
        `backends/gpu/transforms/softmax_rewriter_triton.cc`)."""
        pairs = [(x, source) for x in one.operands for source in one.operands if x is not source]
        for x, source in pairs:
            between = self.reduced_rows(x, source) if source.num_elements == one.num_elements else ()
            if not between:
                continue
            for inner in between:
                self.merge(inner, one, in_rows=True)
                self.remove(inner)
            while self.is_only_for(source, one):
                self.merge(source, one, in_rows=True)
                self.remove(source)
                source = self.rows_of.get(source) or source.operands[0]
            self.rows_of[one] = source
            return

    def reduced_rows(self, x: Instruction, source: Instruction) -> Sequence[Instruction]:
        """What lies between an array and its reduced and broadcast rows; nothing if something else does."""
        found: list[Instruction] = []
        while x is not source:
            is_alone = x in self.kernels and x not in self.kept and len(self.readers[x]) == 1
            if not is_alone or len({*x.operands}) != 1:
                return ()
            names = {inner.name for inner in found}
            is_reduced = not REDUCTIONS.isdisjoint(names)
            if x.name in REDUCTIONS:
                rows = (len(x.operands[0].shape) - 1,)
                is_of_rows = (
                    x.eqn is not None and x.eqn.primitive.name == x.name and tuple(x.eqn.params["axes"]) == rows
                )
                if is_reduced or "broadcast_in_dim" not in names or not is_of_rows:
                    return ()
            elif not x.elementwise and (is_reduced or not (x.role == "bitcast" or x.name == "broadcast_in_dim")):
                return ()
            found.append(x)
            x = x.operands[0]
        return found if any(inner.name in REDUCTIONS for inner in found) else ()

    def is_only_for(self, one: Instruction, reader: Instruction) -> bool:
        """Whether only the kernel of an op on rows reads an op, which has one array, too."""
        is_alone = one in self.kernels and one not in self.kept and [*self.readers[one]] == [reader]
        return is_alone and one.elementwise and (one in self.rows_of or len({*one.operands}) == 1)

    def view(self, one: Instruction) -> None:
        """Reads the operand of a bitcast in all kernels that read it and compute their operands."""
        for reader in [*self.readers[one]]:
            if self.can_compute(reader, one):
                self.merge(one, reader)
        if not self.readers[one]:
            self.remove(one)

    def can_compute(self, reader: Instruction, one: Instruction) -> bool:
        """Whether a kernel computes operands, and this one: not the array that a scatter adds to."""
        overwritten = reader.in_place if reader.role == "unfusible" else ()
        return reader in self.kernels and all(reader.operands[at] is not one for at, _ in overwritten)

    def weigh(self, one: Instruction) -> None:
        """Finds what a producer saves for each reader."""
        self.savings[one], self.totals[one] = {}, (0.0, 0)
        for reader in self.readers[one]:
            self.set_saving(one, reader, self.saving(one, reader))
        self.queue(one)

    def set_saving(self, one: Instruction, reader: Instruction, us: float | None) -> None:
        """Notes what a producer saves for a reader."""
        self.drop_saving(one, reader)
        self.savings[one][reader] = us
        total, impossible = self.totals[one]
        self.totals[one] = total + (us or 0.0), impossible + (us is None)

    def drop_saving(self, one: Instruction, reader: Instruction) -> None:
        """Forgets what a producer saves for a reader."""
        if reader in self.savings[one]:
            us = self.savings[one].pop(reader)
            total, impossible = self.totals[one]
            self.totals[one] = total - (us or 0.0), impossible - (us is None)

    def queue(self, one: Instruction) -> None:
        """Has a producer wait for its turn by what it saves, if it does."""
        self.saved.pop(one, None)
        total, impossible = self.totals[one]
        if one in self.kept or one.role == "unfusible" or not self.savings[one] or impossible:
            return
        saved = LAUNCH_US + self.kernels[one].us + total
        if saved >= 0:
            self.saved[one] = saved
            heapq.heappush(self.waiting, (-saved, -self.place[one], one))

    def saving(self, one: Instruction, reader: Instruction) -> float | None:
        """The microseconds that a reader takes less if its kernel computes a producer; None if it can't."""
        if not self.can_compute(reader, one) or reader.role == "bitcast":
            return None
        producer, consumer = self.kernels[one], self.kernels[reader]
        if self.joins_rows(one, reader):
            return consumer.us - consumer.with_rows(producer).us
        if producer.reduces and consumer.reduces:
            return None
        if producer.is_reduction and not (reader.elementwise and [*consumer.reads[one].values()] == [1.0]):
            return None
        if len(producer.reads) + len(consumer.reads) > MOST_OPERANDS:
            return None
        return consumer.us - consumer.us_with(producer)

    def joins_rows(self, one: Instruction, reader: Instruction) -> bool:
        """Whether the kernel of an op on rows computes an array of a number per row."""
        producer, consumer = self.kernels[one], self.kernels[reader]
        is_inside = consumer.is_of_rows and not consumer.is_reduction and consumer.num_rows == one.num_elements
        return is_inside and (producer.is_of_rows or not producer.is_reduction)

    def fuse(self, one: Instruction) -> None:
        """Computes a producer in the kernels of all that read it."""
        readers, operands = [*self.readers[one]], self.arrays(one)
        for reader in readers:
            self.merge(one, reader, in_rows=self.joins_rows(one, reader))
        self.remove(one)
        for x in operands:
            self.drop_saving(x, one)
        affected = dict.fromkeys(operands)
        for reader in readers:
            for x in self.arrays(reader):
                self.set_saving(x, reader, self.saving(x, reader))
                affected[x] = None
        for x in affected:
            self.queue(x)
        for reader in readers:
            self.weigh(reader)

    def arrays(self, one: Instruction) -> list[Instruction]:
        """What the kernel of a root reads of other kernels that compute their operands."""
        return [x for x in self.kernels[one].reads if isinstance(x, Instruction) and x in self.kernels]

    def merge(self, one: Instruction, reader: Instruction, *, in_rows: bool = False) -> None:
        """Computes a producer in the kernel of a reader."""
        producer, consumer = self.kernels[one], self.kernels[reader]
        self.kernels[reader] = consumer.with_rows(producer) if in_rows else consumer.with_producer(producer)
        del self.readers[one][reader]
        for x in producer.reads:
            if isinstance(x, Instruction):
                self.readers[x][reader] = None

    def remove(self, one: Instruction) -> None:
        """Forgets a producer that all readers compute."""
        for x in self.kernels.pop(one).reads:
            if isinstance(x, Instruction):
                self.readers[x].pop(one, None)
        self.saved.pop(one, None)
        self.fused.add(one)
