"""Buffer lifetimes and the live bytes of each step.

A buffer is live from the step that produces its value to the last one that reads it; arguments always, results until
the end. A value reuses its operand's buffer where XLA lets it: a bitcast, an in-place update, or an elementwise kernel
that is the operand's last reader. A result's buffer holds temporaries until then, if it takes no argument's.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from .collective_overlap import communicates, overlapped
from .cpu_fusion import fuse_on_cpu
from .fusion import Kernel, fuse
from .heap_simulator import Interval, Occupancy, aligned
from .instruction import Body, Instruction
from .kernel_order import Kernels, Order, Step
from .primitive_traits import updates
from .stored_arrays import StoredArrays, read_otherwise

TIE = 1.01
"""Largest ratio of peaks that count as equal: small arrays may be in memory that is not counted, such as VMEM."""


@dataclass(slots=True, eq=False)
class Buffer:
    """A buffer that one or more arrays occupy in turn, and the steps from which and until which it is live."""

    num_bytes: int
    born: int
    dies: int
    makers: list[tuple[int, Instruction]] = field(default_factory=list)
    """The instructions that write it, each with its step, in order."""
    is_temporary: bool = True
    """Whether it is a temporary of this body: not an argument, in a result's buffer, or in VMEM."""


@dataclass(slots=True, eq=False)
class Lifetimes:
    """The buffers of one body over its steps."""

    steps: list[Step]
    buffers: list[Buffer]
    nested: dict[int, list[Lifetimes]]
    """Step -> the lifetimes in the bodies of its loops and branches."""
    results: frozenset[Instruction] = frozenset()
    """Of the body."""
    peak: int | None = None
    """What `peak_bytes` found: each level around asks for it."""

    def timeline(self) -> list[int]:
        """Live temporary bytes at each step, those of nested bodies included."""
        change = [0] * (len(self.steps) + 1)
        for b in self.buffers:
            if b.is_temporary:
                change[b.born] += b.num_bytes
                change[b.dies + 1] -= b.num_bytes
        found, now = [], 0
        for k in range(len(self.steps)):
            now += change[k]
            found.append(now + max((body.peak_bytes() for body in self.nested.get(k, ())), default=0))
        return found

    def peak_bytes(self) -> int:
        """The maximum of the timeline, computed once."""
        if self.peak is None:
            self.peak = max(self.timeline(), default=0)
        return self.peak

    def intervals(self) -> list[Interval]:
        """Bytes of every temporary buffer, and its first and last instant; a step follows those of its bodies."""
        return self._intervals(0)[0]

    def _intervals(self, now: int) -> tuple[list[Interval], int]:
        found: list[Interval] = []
        begun, ended = [], []
        for k in range(len(self.steps)):
            begun.append(now)
            for body in self.nested.get(k, ()):
                inner, now = body._intervals(now)
                found += inner
            ended.append(now)
            now += 1
        own = [b for b in self.buffers if b.is_temporary and b.num_bytes]
        return found + [(b.num_bytes, begun[b.born], ended[b.dies]) for b in own], now


def lifetimes(
    body: Body,
    carried: Sequence[tuple[Instruction, int]],
    not_temporary: set[Instruction],
    orders: Sequence[Order],
    holders: Sequence[Instruction] = (),
) -> Lifetimes:
    """The buffers of one body.

    Args:
        carried: (argument, result) pairs that share a buffer: a result that can't is a temporary, copied in the end.
        not_temporary: results whose buffers are counted elsewhere.
        orders: of which the one with the lowest peak is taken, the first of those that are almost equal. Where GPUs
            communicate results count as temporaries for that, and collectives are overlapped in this order.
        holders: results whose buffers hold temporaries before, those of donated arguments after their last use.
    """
    alive = body.live_instructions()
    traits = body.traits
    kernels = fuse_on_cpu(alive, body.results) if traits.uses_library else fuse(alive, body.results, traits)
    roots = [kernel.root for kernel in kernels if kernel.root.bodies]
    nested = {root: [_nested(root, inner, orders) for inner in root.bodies] for root in roots}
    known = Kernels(kernels, body.results)
    schedules = [order(known, body.results) for order in orders]
    arrays = StoredArrays([kernel for step in schedules[0] for kernel in step.kernels], body.traits)

    def found(steps: list[Step]) -> Lifetimes:
        return _BufferAssignment(steps, arrays, body, carried, not_temporary, nested).lifetimes(holders)

    if traits.schedule == "latency hiding" and communicates(schedules[0]):
        made = [_BufferAssignment(steps, arrays, body, [], set(), nested).lifetimes([]) for steps in schedules]
        return found(overlapped(min(made, key=Lifetimes.peak_bytes).steps, body.results))
    everything = [found(steps) for steps in schedules]
    least = min(one.peak_bytes() for one in everything)
    return next(one for one in everything if one.peak_bytes() <= TIE * least)


def _nested(source: Instruction, body: Body, orders: Sequence[Order]) -> Lifetimes:
    """The buffers of a loop body or branch."""
    if source.name == "cond":
        return lifetimes(body, [], set(body.results), orders)
    shift = len(source.operands) - len(body.arguments)
    return lifetimes(body, [(body.arguments[at - shift], k) for at, k in source.in_place], set(), orders)


class _BufferAssignment:
    def __init__(
        self,
        steps: list[Step],
        arrays: StoredArrays,
        body: Body,
        carried: Sequence[tuple[Instruction, int]],
        not_temporary: set[Instruction],
        nested: dict[Instruction, list[Lifetimes]],
    ):
        self.steps, self.body, self.carried, self.not_temporary = steps, body, carried, not_temporary
        self.arrays, self.nested = arrays, nested
        self.step_of: dict[Instruction, int] = {}
        self.last_read: dict[Instruction, int] = {}
        for k, step in enumerate(steps):
            for kernel in step.kernels:
                root = kernel.root
                self.step_of[root] = self.step_of[root.operands[0]] if root.role == "tuple-element" else k
            for operand in step.operands:
                self.last_read[operand] = k
        self.results = set(body.results)
        self.donated = {body.results[number]: argument for argument, number in carried}
        self.end = len(steps) - 1
        self.buffer_of: dict[Instruction, Buffer] = {}
        self.buffers: list[Buffer] = []
        self.bound = self.bound_values()
        """What shares its buffer by the meaning of an op, and so with no other elementwise operand or reader
        (openxla/xla, `service/heap_simulator/heap_simulator.cc`)."""

    def bound_values(self) -> set[Instruction]:
        """The carries of loops, the results of branches, and what is updated in place."""
        found = {self.arrays.origin[self.body.results[number]] for _, number in self.carried}
        for root in self.arrays.kernel_of:
            source = root.operands[0] if root.role == "tuple-element" else root
            if not is_bound(source):
                continue
            found.add(root)
            for at, _ in root.in_place:
                operand = root.operands[at]
                last_read = self.last_read.get(operand, math.inf)  # never where its own kernel computes it
                if last_read <= self.step_of[root] and operand not in self.results:
                    found.add(self.arrays.origin[operand])
        return found

    def lifetimes(self, holders: Sequence[Instruction]) -> Lifetimes:
        nested: dict[int, list[Lifetimes]] = {}
        for k, step in enumerate(self.steps):
            for kernel in step.kernels:
                self.assign(kernel)
                if kernel.root.bodies:
                    nested.setdefault(k, []).extend(self.nested[kernel.root])
        self.alias()
        if holders:
            self.hold_in(holders)
        return Lifetimes(self.steps, self.buffers, nested, frozenset(self.results))

    def assign(self, kernel: Kernel) -> None:
        """Assign a buffer to a kernel's result: an operand's or a new one."""
        root = kernel.root
        if root.bodies or root.num_bytes == 0:
            return
        born = self.step_of[root]
        dies = self.end if root in self.results else max(self.last_read.get(root, born), born)
        reused = self.reused_buffer(kernel, born)
        if reused is not None:
            reused.dies = max(reused.dies, dies)
            reused.makers.append((born, root))
            reused.is_temporary = reused.is_temporary and root not in self.not_temporary
            self.buffer_of[root] = reused
            return
        is_argument = root.role == "argument"
        buffer = Buffer(
            aligned(root.stored_bytes),
            0 if is_argument else born,
            self.end if is_argument else dies,
            [(born, root)],
            is_temporary=not is_argument and root not in self.not_temporary,
        )
        self.buffers.append(buffer)
        self.buffer_of[root] = buffer

    def reused_buffer(self, kernel: Kernel, born: int) -> Buffer | None:
        """The operand's buffer that a kernel's result reuses, if any."""
        root = kernel.root
        if self.arrays.origin[root] is not root:
            return self.buffer_of.get(self.arrays.origin[root])
        if root.role == "tuple-element":
            source, at = root.operands[0], self.arrays.operand_in_place(root.operands[0], root.element)
            free = self.unread_buffer if source.bodies else self.freed_buffer
            return None if at is None else free(source.operands[at], born)
        if root.name == "all-reduce" and self.steps[born].is_asynchronous:
            return self.reduced_buffer(root, born)
        is_update = is_bound(root)
        if root in self.bound and not is_update:
            return None
        found = [x for x in self.overwritten(kernel) if is_update or self.arrays.origin.get(x) not in self.bound]
        return next(filter(None, (self.freed_buffer(x, born) for x in found)), None)

    def overwritten(self, kernel: Kernel) -> list[Instruction]:
        """The operands into which a kernel may write its result."""
        root = kernel.root
        if root in self.not_temporary and not is_bound(root):
            return []
        return [root.operands[root.in_place[0][0]]] if root.in_place else self.arrays.overwritable(kernel)

    def freed_buffer(self, operand: Instruction, step: int) -> Buffer | None:
        """The buffer of an operand that is not read after a step, unless the compiler keeps it."""
        if self.body.traits.keeps_several and self.is_one_of_several(operand):
            return None
        return self.unread_buffer(operand, step)

    def unread_buffer(self, operand: Instruction, step: int) -> Buffer | None:
        """The buffer of an operand that is not read after a step."""
        buffer = self.buffer_of.get(operand)
        return buffer if buffer is not None and buffer.is_temporary and buffer.dies <= step else None

    def reduced_buffer(self, result: Instruction, step: int) -> Buffer | None:
        """The buffer of the operand of an asynchronous all-reduce, whose result is the same array to XLA."""
        alike = [x for x in result.operands[:1] if x.stored_bytes == result.stored_bytes]
        return self.unread_buffer(alike[0], step) if alike else None

    def is_one_of_several(self, x: Instruction) -> bool:
        """Whether a kernel makes an array beside others: also cuDNN, which has scratch memory, and a collective that
        others overlap, whose start it is (openxla/xla, `service/heap_simulator/heap_simulator.cc`)."""
        made = self.arrays.origin.get(x, x)
        if made not in self.step_of:
            return False
        step = self.steps[self.step_of[made]]
        if step.is_asynchronous or (self.body.traits.uses_cudnn and made.name == "conv_general_dilated"):
            return True
        return len(step.kernels) > 1 and made.role != "tuple-element" and made.group is None

    def alias(self) -> None:
        """Alias each new loop carry or donated result to the old one, unless a kernel needs both at once.

        Other readers of a donated argument run before the result is written, those of a loop carry as scheduled.
        """
        for argument, number in self.carried:
            new, old = self.buffer_of.get(self.body.results[number]), self.buffer_of.get(argument)
            if new is None or new is old or new.makers[0][1].role == "argument":
                continue
            if old is None:  # nothing reads the argument, whose buffer only the result takes, not what it is made in
                new.dies = new.makers[-1][0]
                new.is_temporary = new.is_temporary and len(new.makers) > 1
                continue
            first = self.arrays.kernel_of[new.makers[0][1]]
            is_overwritten = any(first.root.operands[at] is argument for at, _ in first.root.in_place)
            is_moved = first.root.name == "copy" and self.last_read.get(argument, 0) <= new.born
            is_replaced = is_overwritten or is_moved
            needs_both = argument in first.operands and not is_replaced and argument in read_otherwise(first)
            readers = (kernel for _, x in new.makers for kernel in self.arrays.readers.get(x, ()))
            is_early = new.is_temporary and new.born < self.last_read.get(argument, 0)
            new.is_temporary = is_early or needs_both or any(argument in kernel.operands for kernel in readers)

    def hold_in(self, results: Sequence[Instruction]) -> None:
        """Place temporaries into the buffers of results: the largest first, of equal ones those of constants, and each
        into the smallest that is free, of equal ones the last. A donated argument is in its result's buffer until its
        last use.

        XLA does so before it packs the others into a heap (openxla/xla, `service/buffer_assignment.cc`). One of several
        results of a loop or another instruction lives in a buffer of its own.
        """
        hosts = {self.buffer_of[x]: x for x in reversed(results) if x in self.buffer_of and self.is_host(x)}
        smallest = sorted(hosts, key=lambda b: b.num_bytes)
        sizes = [b.num_bytes for b in smallest]
        used = Occupancy(len(self.steps))
        replacing: dict[Instruction, list[int]] = {}
        """Array -> the hosts whose results may be written over it."""
        for k, host in enumerate(smallest):
            result = hosts[host]
            used.add(k, host.born, self.end)
            if result in self.donated:
                used.add(k, 0, self.last_read[self.donated[result]])
            for x in self.replaced_by(result):
                replacing.setdefault(x, []).append(k)
        alone = [b for b in self.buffers if b.is_temporary and b.makers[0][1].role != "tuple-element"]
        for b in sorted(alone, key=lambda b: (-b.num_bytes, bool(b.makers[0][1].operands))):
            first = bisect.bisect_left(sizes, b.num_bytes)
            found = used.first_free(first, b.born, b.dies)
            ending = [k for k in replacing.get(b.makers[-1][1], ()) if first <= k < found]
            over = next((k for k in ending if used.is_free(k, b.born, b.dies - 1)), None)
            k = found if over is None else over
            if k < len(smallest):
                used.add(k, b.born, b.dies - (over is not None))
                b.is_temporary = False

    def is_host(self, result: Instruction) -> bool:
        """Whether the buffer of a result is free before: a new one, or of a donated argument that is read no more."""
        new, argument = self.buffer_of[result], self.donated.get(result)
        if new.is_temporary or argument is None:
            return not new.is_temporary
        return self.buffer_of.get(argument) not in (None, new) and self.last_read.get(argument, self.end) < new.born

    def replaced_by(self, result: Instruction) -> list[Instruction]:
        """The arrays over which the kernel of a result may write it, if all that read them run with it."""
        result = self.arrays.origin[result]  # of which it may be a bitcast
        kernel = self.arrays.kernel_of[result]
        is_reduced = result.in_place and not is_bound(result)
        found = result.operands[:1] if is_reduced else self.arrays.overwritable(kernel)
        return [x for x in found if all(self.step_of[k.root] == self.step_of[result] for k in self.arrays.readers[x])]


def is_bound(one: Instruction) -> bool:
    """Whether its results share the buffers of operands by its meaning, not only where that is possible; or none, as
    those of gathers that run on TPUs' sparse cores."""
    return bool(one.bodies) or updates(one.name) or (one.name == "gather" and one.role == "unfusible")
