"""Buffer lifetimes and the live bytes of each step.

A buffer is live from the step that produces its value to the last one that reads it; arguments always, results until
the end. A value reuses its operand's buffer where XLA lets it: a bitcast, an in-place update, or an elementwise kernel
that is the operand's last reader.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .fusion import Kernel, fuse
from .heap_simulator import Interval, aligned
from .instruction import Body, Instruction
from .kernel_order import Order, Step
from .primitive_traits import BARRIER, updates


@dataclass(slots=True, eq=False)
class Buffer:
    """A buffer that one or more arrays occupy in turn, and the steps from which and until which it is live."""

    num_bytes: int
    born: int
    dies: int
    makers: list[tuple[int, Instruction]] = field(default_factory=list)
    """The instructions that write it, each with its step, in order."""
    is_temporary: bool = True
    """Whether it is a temporary of this body: neither an argument nor in a result's buffer."""
    filled: int | None = None
    """The first step of a loop that fills it row by row, as one does a stack."""


@dataclass(slots=True, eq=False)
class Lifetimes:
    """The buffers of one body over its steps."""

    steps: list[Step]
    buffers: list[Buffer]
    nested: dict[int, list[Lifetimes]]
    """Step -> the lifetimes in the bodies of its loops and branches."""

    def timeline(self) -> list[int]:
        """Live temporary bytes at each step, those of nested bodies included."""
        return self._timeline([b.dies for b in self.buffers], Lifetimes.peak_bytes)

    def peak_bytes(self) -> int:
        """The maximum of the timeline."""
        return max(self.timeline(), default=0)

    def peak_bytes_without_stacks(self) -> int:
        """The maximum of the timeline if stacks were free from the loop on that fills them."""
        ends = [b.dies if b.filled is None else b.filled - 1 for b in self.buffers]
        return max(self._timeline(ends, Lifetimes.peak_bytes_without_stacks), default=0)

    def _timeline(self, ends: Sequence[int], nested_peak: Callable[[Lifetimes], int]) -> list[int]:
        change = [0] * (len(self.steps) + 1)
        for b, end in zip(self.buffers, ends, strict=True):
            if b.is_temporary:
                change[b.born] += b.num_bytes
                change[max(end + 1, b.born)] -= b.num_bytes
        found, now = [], 0
        for k in range(len(self.steps)):
            now += change[k]
            found.append(now + max(map(nested_peak, self.nested.get(k, ())), default=0))
        return found

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
    order: Order,
    *,
    are_donated: bool = False,
) -> Lifetimes:
    """The buffers of one body.

    Args:
        carried: (argument, result) pairs that share a buffer.
        not_temporary: results whose buffers are counted elsewhere.
        are_donated: whether the pairs are donated arguments: a result that is written while its argument is still
            read is a temporary, copied in the end.
    """
    steps = order(fuse(body.live_instructions(), body.results, counts_bytes=body.counts_bytes), body.results)
    found = _BufferAssignment(steps, body, carried, not_temporary, order)
    return found.lifetimes(are_donated=are_donated)


class _BufferAssignment:
    def __init__(
        self,
        steps: list[Step],
        body: Body,
        carried: Sequence[tuple[Instruction, int]],
        not_temporary: set[Instruction],
        order: Order,
    ):
        self.steps, self.body, self.carried, self.not_temporary, self.order = steps, body, carried, not_temporary, order
        self.step_of: dict[Instruction, int] = {}
        self.last_read: dict[Instruction, int] = {}
        self.readers: dict[Instruction, list[Kernel]] = {}
        for k, step in enumerate(steps):
            for kernel in step.kernels:
                root = kernel.root
                self.step_of[root] = self.step_of[root.operands[0]] if root.role == "tuple-element" else k
                for operand in kernel.operands:
                    self.readers.setdefault(operand, []).append(kernel)
            for operand in step.operands:
                self.last_read[operand] = k
        self.results = set(body.results)
        self.end = len(steps) - 1
        self.buffer_of: dict[Instruction, Buffer] = {}
        self.buffers: list[Buffer] = []
        self.numbers: dict[Instruction, int] = {}
        """Tuple element -> its index among those of its operand."""
        counts: Counter[Instruction] = Counter()
        for one in body.instructions:
            if one.role == "tuple-element":
                self.numbers[one] = counts[one.operands[0]]
                counts[one.operands[0]] += 1

    def lifetimes(self, *, are_donated: bool) -> Lifetimes:
        nested: dict[int, list[Lifetimes]] = {}
        for k, step in enumerate(self.steps):
            for kernel in step.kernels:
                self.assign(kernel)
                for body in kernel.root.bodies:
                    nested.setdefault(k, []).append(self.nested(kernel.root, body))
        if are_donated:
            self.copy_interfering()
        else:
            self.alias_carried()
        return Lifetimes(self.steps, self.buffers, nested)

    def nested(self, source: Instruction, body: Body) -> Lifetimes:
        """The buffers of a loop body or branch."""
        if source.name == "cond":
            return lifetimes(body, [], set(body.results), self.order)
        shift = len(source.operands) - len(body.arguments)
        return lifetimes(body, [(body.arguments[at - shift], k) for at, k in source.in_place], set(), self.order)

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
            if reused.filled is None and self.is_stack(root):
                reused.filled = born
            self.buffer_of[root] = reused
            return
        is_argument = root.role == "argument"
        buffer = Buffer(
            aligned(root.num_bytes),
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
        if root.role == "bitcast" and len(kernel.members) == 1:
            return self.buffer_of.get(root.operands[0])
        if root.role == "tuple-element":
            source = root.operands[0]
            number = self.numbers[root]
            for at, element in source.in_place:
                if element == number and source.name == BARRIER:
                    return self.buffer_of.get(source.operands[at])
                if element == number:
                    return self.freed_buffer(source.operands[at], born)
            return None
        if self.steps[born].is_in_place:
            return self.freed_buffer(root.operands[0], born)
        for at, _ in root.in_place:
            return self.freed_buffer(root.operands[at], born)
        if not root.elementwise or root in self.not_temporary:
            return None
        for operand in kernel.operands:
            if (
                operand.num_bytes == root.num_bytes
                and operand.shape == root.shape
                and self.is_elementwise(kernel, operand)
            ):
                found = self.freed_buffer(operand, born)
                if found is not None:
                    return found
        return None

    def is_stack(self, one: Instruction) -> bool:
        """Whether an instruction is a result of a loop that updates it in place in each iteration."""
        bodies = one.operands[0].bodies if one.role == "tuple-element" else ()
        return len(bodies) == 1 and updates(bodies[0].results[self.numbers[one]].name)

    def freed_buffer(self, operand: Instruction, step: int) -> Buffer | None:
        """The buffer of an operand that is not read after a step."""
        buffer = self.buffer_of.get(operand)
        if buffer is None or operand.role == "argument" or not buffer.is_temporary:
            return None
        return (
            buffer if buffer.dies <= step and all(self.last_read.get(m, 0) <= step for _, m in buffer.makers) else None
        )

    def is_elementwise(self, kernel: Kernel, operand: Instruction) -> bool:
        """Whether every path in a kernel from an operand to the result is elementwise."""
        reached = {operand}
        for m in kernel.members:
            if not reached.isdisjoint(m.operands):
                if not m.elementwise:
                    return False
                reached.add(m)
        return True

    def alias_carried(self) -> None:
        """Alias each new loop carry to the old one where the old one is no longer read."""
        kernels = {kernel.root: kernel for step in self.steps for kernel in step.kernels}
        for argument, number in self.carried:
            result = self.body.results[number]
            new, old = self.buffer_of.get(result), self.buffer_of.get(argument)
            if new is None or old is None or new is old:
                continue
            made, read = new.born, self.last_read.get(argument, 0)
            first = kernels[new.makers[0][1]]
            updated = any(first.root.operands[at] is argument for at, _ in first.root.in_place)
            if made > read or (made == read and (updated or self.is_elementwise(first, argument))):
                new.is_temporary = False

    def copy_interfering(self) -> None:
        """Keep a donated result apart from its argument where a reader of the argument needs the result, too; other
        readers run before the result is written."""
        for argument, number in self.carried:
            new, old = self.buffer_of.get(self.body.results[number]), self.buffer_of.get(argument)
            if new is None or new is old or new.makers[0][1].role == "argument":
                continue
            if new.makers[0][0] <= self.last_read.get(argument, -1) and self.is_read_after(argument, new):
                new.is_temporary = True

    def is_read_after(self, argument: Instruction, new: Buffer) -> bool:
        """Whether some kernel that reads an argument also reads, or depends on, what another buffer holds."""
        last = self.last_read[argument]
        reached, waiting = {x for _, x in new.makers}, [x for _, x in new.makers]
        while waiting:
            for kernel in self.readers.get(waiting.pop(), ()):
                if argument in kernel.operands:
                    return True
                if kernel.root not in reached and self.step_of[kernel.root] <= last:
                    reached.add(kernel.root)
                    waiting.append(kernel.root)
        return False
