"""Peak memory by liveness: which arrays are there at each step, and how many bytes they are.

An array is there from the step that makes it to the last one that reads it; arguments throughout, results from when
they are made to the end. An array takes its operand's place where XLA lets it: a view, an update in place, an
elementwise kernel whose operand nobody reads any more.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from .fusion import Kernel, fuse
from .instruction import Body, Instruction
from .lowering import DeviceProgram
from .packing import Interval, placed
from .primitives import BARRIER
from .schedule import Order, Step

ALIGNMENT = 64
"""Bytes; XLA:CPU begins every array at a multiple."""


@dataclass(slots=True, eq=False)
class Buffer:
    """Memory that one array after another takes, from one step to another."""

    num_bytes: int
    born: int
    dies: int
    makers: list[tuple[int, Instruction]] = field(default_factory=list)
    """The arrays that it holds, each with the step that makes it, in order."""
    is_own: bool = True
    """Whether it is memory of this body: not an argument's or a result's."""


@dataclass(slots=True, eq=False)
class Lifetimes:
    """The buffers of one body over its steps."""

    steps: list[Step]
    buffers: list[Buffer]
    inside: dict[int, list[Lifetimes]]
    """Step -> the bodies of the loops and branches that it runs."""

    def inner(self, step: int) -> int:
        """The peak of the loops and branches that a step runs, in bytes."""
        return max((body.peak_bytes() for body in self.inside.get(step, ())), default=0)

    def timeline(self) -> list[int]:
        """Bytes that are there at each step, what runs inside it included."""
        change = [0] * (len(self.steps) + 1)
        for b in self.buffers:
            if b.is_own:
                change[b.born] += b.num_bytes
                change[b.dies + 1] -= b.num_bytes
        found, now = [], 0
        for k in range(len(self.steps)):
            now += change[k]
            found.append(now + self.inner(k))
        return found

    def peak_bytes(self) -> int:
        """The most at any step."""
        return max(self.timeline(), default=0)

    def places(self, results: Collection[Instruction]) -> list[Interval]:
        """The memory of these results, each with the moments in which it holds one."""
        moments = self._moments(0)
        return [
            (b.num_bytes, moments[b.born][0], moments[b.dies][1])
            for b in self.buffers
            if not b.is_own and b.makers[-1][1] in results
        ]

    def _moments(self, start: int) -> list[tuple[int, int]]:
        """The first and the last moment of each step."""
        found, now = [], start
        for k in range(len(self.steps)):
            begun = now
            for body in self.inside.get(k, ()):
                now = body._moments(now)[-1][1] + 1
            found.append((begun, now))
            now += 1
        return found

    def held(self, start: int = 0) -> list[tuple[Buffer, Interval]]:
        """Every buffer of its own with its first and last moment, those of loops and branches too.

        A moment is a step; the steps of what runs inside a step come before it.
        """
        found: list[tuple[Buffer, Interval]] = []
        moments = self._moments(start)
        for k, bodies in self.inside.items():
            now = moments[k][0]
            for body in bodies:
                found += body.held(now)
                now = body._moments(now)[-1][1] + 1
        own = [b for b in self.buffers if b.is_own and b.num_bytes]
        return found + [(b, (b.num_bytes, moments[b.born][0], moments[b.dies][1])) for b in own]

    def intervals(self) -> list[Interval]:
        """The same without the buffers."""
        return [interval for _, interval in self.held()]

    def use(self, results: Collection[Instruction]) -> None:
        """Puts buffers where these results will be, as long as those are not there."""
        held = self.held()
        for k in placed([interval for _, interval in held], self.places(results)):
            held[k][0].is_own = False


def program_lifetimes(program: DeviceProgram, donated: Mapping[int, int], order: Order) -> Lifetimes:
    """The buffers of a whole program; those of arguments and results are not its own.

    Args:
        program: what one device runs.
        donated: result -> the argument whose memory it takes.
        order: in which kernels run.
    """
    pairs = [(program.inputs[a], k) for k, a in donated.items()]
    found = lifetimes(program.body, pairs, {*program.outputs}, order)
    found.use({x for k, x in enumerate(program.outputs) if k not in donated})
    return found


def lifetimes(
    body: Body, carried: Sequence[tuple[Instruction, int]], outside: set[Instruction], order: Order
) -> Lifetimes:
    """The buffers of one body.

    Args:
        body: the instructions.
        carried: (argument, result) pairs of one place in memory.
        outside: results whose memory is counted elsewhere.
        order: in which kernels run.
    """
    steps = order(fuse(body.needed(), body.results), body.results)
    return _Walk(steps, body, carried, outside, order).lifetimes()


class _Walk:
    def __init__(
        self,
        steps: list[Step],
        body: Body,
        carried: Sequence[tuple[Instruction, int]],
        outside: set[Instruction],
        order: Order,
    ):
        self.steps, self.body, self.carried, self.outside, self.order = steps, body, carried, outside, order
        self.at: dict[Instruction, int] = {}
        self.last: dict[Instruction, int] = {}
        for k, step in enumerate(steps):
            for kernel in step.kernels:
                root = kernel.root
                self.at[root] = self.at[root.operands[0]] if root.role == "part" else k
            for operand in step.operands:
                self.last[operand] = k
        self.results = set(body.results)
        self.end = len(steps) - 1
        self.holder: dict[Instruction, Buffer] = {}
        self.buffers: list[Buffer] = []
        self._parts: dict[Instruction, list[Instruction]] = {}

    def lifetimes(self) -> Lifetimes:
        inside: dict[int, list[Lifetimes]] = {}
        for k, step in enumerate(self.steps):
            for kernel in step.kernels:
                self.place(kernel, k)
                for body in kernel.root.bodies:
                    inside.setdefault(k, []).append(self.inside(kernel.root, body))
        self.share_carried()
        return Lifetimes(self.steps, self.buffers, inside)

    def inside(self, whole: Instruction, body: Body) -> Lifetimes:
        """The buffers of a loop's or a branch's body."""
        if whole.name == "cond":
            return lifetimes(body, [], set(body.results), self.order)
        shift = len(whole.operands) - len(body.arguments)
        return lifetimes(body, [(body.arguments[at - shift], k) for at, k in whole.in_place], set(), self.order)

    def place(self, kernel: Kernel, k: int) -> None:
        """Gives a kernel's result a buffer: an operand's, or one of its own."""
        root = kernel.root
        if root.bodies or root.num_bytes == 0:
            return
        born = self.at[root]
        dies = self.end if root in self.results else max(self.last.get(root, born), born)
        taken = self.taken(kernel, born)
        if taken is not None:
            taken.dies = max(taken.dies, dies)
            taken.makers.append((born, root))
            taken.is_own = taken.is_own and root not in self.outside
            self.holder[root] = taken
            return
        size = -(-root.num_bytes // ALIGNMENT) * ALIGNMENT
        own = root.role != "argument" and root not in self.outside
        buffer = Buffer(
            size,
            0 if root.role == "argument" else born,
            self.end if root.role == "argument" else dies,
            [(born, root)],
            own,
        )
        self.buffers.append(buffer)
        self.holder[root] = buffer

    def taken(self, kernel: Kernel, born: int) -> Buffer | None:
        """The buffer of an operand that the result takes."""
        root = kernel.root
        if root.role == "view" and len(kernel.members) == 1:
            return self.holder.get(root.operands[0])
        if root.role == "part":
            whole = root.operands[0]
            number = self.parts(whole).index(root)
            for at, part in whole.in_place:
                if part == number and whole.name == BARRIER:
                    return self.holder.get(whole.operands[at])
                if part == number:
                    return self.free(whole.operands[at], born)
            return None
        for at, _ in root.in_place:
            return self.free(root.operands[at], born)
        if not root.elementwise or root in self.outside:
            return None
        for operand in kernel.operands:
            if (
                operand.num_bytes == root.num_bytes
                and operand.shape == root.shape
                and self.is_elementwise(kernel, operand)
            ):
                found = self.free(operand, born)
                if found is not None:
                    return found
        return None

    def parts(self, whole: Instruction) -> list[Instruction]:
        if whole not in self._parts:
            self._parts[whole] = [x for x in self.body.instructions if x.role == "part" and x.operands[0] is whole]
        return self._parts[whole]

    def free(self, operand: Instruction, step: int) -> Buffer | None:
        """The buffer of an operand that nothing reads after a step."""
        buffer = self.holder.get(operand)
        if buffer is None or operand.role == "argument" or not buffer.is_own:
            return None
        return buffer if buffer.dies <= step and all(self.last.get(m, 0) <= step for _, m in buffer.makers) else None

    def is_elementwise(self, kernel: Kernel, operand: Instruction) -> bool:
        """Whether all ways from an operand to the result are elementwise."""
        inside = {operand}
        for m in kernel.members:
            if any(x in inside for x in m.operands):
                if not m.elementwise:
                    return False
                inside.add(m)
        return True

    def share_carried(self) -> None:
        """What a loop carries takes the place of what it carried before, once that is not read any more."""
        kernels = {kernel.root: kernel for step in self.steps for kernel in step.kernels}
        for argument, number in self.carried:
            result = self.body.results[number]
            new, old = self.holder.get(result), self.holder.get(argument)
            if new is None or old is None or new is old:
                continue
            made, read = new.born, self.last.get(argument, 0)
            first = kernels[new.makers[0][1]]
            updated = any(first.root.operands[at] is argument for at, _ in first.root.in_place)
            if made > read or (made == read and (updated or self.is_elementwise(first, argument))):
                new.is_own = False
