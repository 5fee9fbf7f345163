"""Instruction fusion on XLA:CPU: which instructions are stored, and which are computed inside their consumers.

First a library takes large reductions with the ops that only they need, and what follows up to what several read
(openxla/xla, `backends/cpu/transforms/library_rewriter.cc`). Then, from the last instruction to the first, each kernel
computes its operands (`service/instruction_fusion.cc`, `service/cpu/cpu_instruction_fusion.cc`),

- again for each kernel that reads them, unless they are expensive, or read more than they write and something that
  needs them is stored in between;
- unless the code would be too long (`service/fusion_node_indexing_evaluation.cc`): an operand at another index is
  another copy of the code, and no value is used twice that needs a loop or a branch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp

from .fusion import Fusion, Growth, Kernel, is_fusible
from .instruction import Instruction, Users, users
from .primitive_traits import REDUCTIONS, SLICES, dilates

IN_LIBRARY = frozenset(
    "abs add add_any ceil convert convert_element_type cos div erf exp expm1 floor integer_pow log log1p logistic max "
    "min mul neg pow round rsqrt sign sin sqrt square sub tan tanh".split()
)
"""Elementwise ops on floats that the library computes."""
MOVED_IN_LIBRARY = frozenset("broadcast broadcast_in_dim iota".split())
MIN_LIBRARY_ELEMENTS = 4096
"""The library runs ops that read or write at least as many elements."""

MAX_COPIES = 15
"""Of the code of one instruction in one kernel."""
MAX_REDUCTIONS = 6
"""Of one kernel."""
MAX_PARTS = 8
"""Of a concatenation that a kernel computes."""
MIN_ROW_BYTES, MIN_ROWS_BYTES = 64, 2048
"""Of a concatenation along the last dim that runs alone: of its rows, and in all."""
IN_BLOCKS = REDUCTIONS | {"concatenate", "dynamic_update_slice", "pad", "stack"}
"""What needs a loop or a branch, after which code can't use a value that was computed before."""


def fuse_on_cpu(instructions: Sequence[Instruction], results: Sequence[Instruction]) -> list[Kernel]:
    """The kernels of a body in the order of their roots.

    Args:
        instructions: operands before their users.
        results: always stored.
    """
    return _CpuFusion(instructions, results).kernels()


class _CpuFusion(Fusion):
    def __init__(self, instructions: Sequence[Instruction], results: Sequence[Instruction]):
        super().__init__(instructions, users(instructions))
        self.results = set(results)
        self.library = _Library(self.users, self.results)
        for one in reversed(instructions):
            if one.is_library_reduction:
                self.library.take(one)
        self.fuses = {x: is_fusible(x) and x not in self.library.kernels and not runs_alone(x) for x in instructions}
        """Whether an instruction joins kernels, and others its own."""
        self.once = self.never_repeated()
        self.stored = {*results, *(kernel.root for kernel in self.library.kernels.values())}

    def growth(self, root: Instruction) -> Growth:
        if root in self.library.kernels:
            return self.library.kernels[root]
        return _Growth(self, root)

    def never_repeated(self) -> set[Instruction]:
        """What is stored once rather than computed by each kernel that reads it.

        It reads more than it writes, and on a way from it to one of its users something is stored.
        """
        found: set[Instruction] = set()
        below: dict[Instruction, int] = {}
        """Instruction -> the set, as bits, of what needs it."""
        behind: dict[Instruction, int] = {}
        """Of these, what needs something stored that needs it."""
        computed = {x: [y for y in x.operands if y.role != "argument"] for x in self.instructions}
        first_operand = {x: min(y, key=self.place.__getitem__, default=None) for x, y in computed.items()}
        for one in reversed(self.instructions):
            if one.role == "argument":
                continue
            users = self.users[one]
            reached = behind_stored = 0
            for user in users:
                reached |= 1 << self.place[user] | below[user]
                behind_stored |= behind[user]
                if not self.may_join(one, user):
                    behind_stored |= 1 << self.place[user] | below[user]
                if one is first_operand[user]:
                    del below[user], behind[user]  # no other operand asks
            if reads_more(one):
                is_read_behind = any(behind_stored >> self.place[user] & 1 for user in users)
                if one in self.results or not is_fusible(one) or is_read_behind:
                    found.add(one)
                    behind_stored = reached
            below[one], behind[one] = reached, behind_stored
        return found

    def may_join(self, producer: Instruction, user: Instruction) -> bool:
        """Whether a kernel of one instruction may compute an operand."""
        if not (self.fuses[producer] and self.fuses[user]):
            return False
        is_shared = len(self.users[producer]) > 1 or producer in self.results
        return not (producer.expensive and (is_shared or _reuses(user, producer)))


@dataclass(slots=True, eq=False)
class _LibraryKernel:
    """What the library computes at once."""

    root: Instruction
    members: set[Instruction] = field(default_factory=set)

    def takes(self, producer: Instruction, inside: Collection[Instruction], *, is_shared: bool) -> bool:
        return producer in self.members


class _Library:
    """The kernels of the library."""

    def __init__(self, readers: Users, results: Collection[Instruction]):
        self.readers, self.results = readers, results
        self.kernels: dict[Instruction, _LibraryKernel] = {}
        """Of each instruction that it computes."""

    def take(self, reduction: Instruction) -> None:
        """Run a reduction, the ops that only it needs, and what follows, up to what several read."""
        if reduction in self.kernels:
            return
        kernel = _LibraryKernel(reduction)
        self.add(kernel, reduction)
        while len(self.readers[kernel.root]) == 1 and kernel.root not in self.results:
            (user,) = self.readers[kernel.root]
            if not (user in self.kernels or runs_in_library(user)):
                return
            kernel.root = self.kernels[user].root if user in self.kernels else user
            self.add(kernel, user)

    def add(self, kernel: _LibraryKernel, one: Instruction) -> None:
        """Add an instruction, or the kernel that has it, and what only the kernel needs."""
        waiting = [one]
        while waiting:
            one = waiting.pop()
            added = self.kernels[one].members if one in self.kernels else {one}
            if one in kernel.members:
                continue
            kernel.members |= added
            self.kernels.update(dict.fromkeys(added, kernel))
            waiting += [x for member in added for x in member.operands if self.only_needs(kernel, x)]

    def only_needs(self, kernel: _LibraryKernel, one: Instruction) -> bool:
        """Whether the library computes an operand that only one kernel reads; a transpose is often another layout."""
        runs = one in self.kernels or one.name == "transpose" or runs_in_library(one)
        if one in kernel.members or one in self.results or not runs:
            return False
        return all(user in kernel.members for user in self.readers[one])


@dataclass(slots=True)
class _Growth:
    fusion: _CpuFusion
    root: Instruction
    index_users: dict[Instruction, set[Instruction | None]] = field(default_factory=dict)
    """Instruction -> the members that compute the indices it is read at; None: the kernel itself."""
    num_copies: dict[Instruction | None, int] = field(default_factory=dict)
    reused: set[Instruction] = field(default_factory=set)
    """What is read more than once per element."""
    num_uses: dict[Instruction, int] = field(default_factory=lambda: defaultdict(int))
    """By members."""
    num_reductions: int = 0

    def __post_init__(self) -> None:
        self.index_users[self.root], self.num_copies[None] = {None}, 1
        self.join(self.root)

    def takes(self, producer: Instruction, inside: Collection[Instruction], *, is_shared: bool) -> bool:
        fusion = self.fusion
        if producer in fusion.once or not fusion.fuses[producer] or not fusion.fuses[self.root]:
            return False
        if producer.expensive and (is_shared or producer in fusion.results or producer in self.reused):
            return False
        if self.root.in_place and _updates(self.root, producer):
            return False
        if len(inside) > 1 and not self.is_short(producer, is_shared=is_shared or producer in fusion.results):
            return False
        self.join(producer)
        return True

    def is_short(self, producer: Instruction, *, is_shared: bool) -> bool:
        """Whether the code of the kernel stays short with a producer."""
        if producer.name in REDUCTIONS and self.num_reductions >= MAX_REDUCTIONS:
            return False
        copies = self.copies_of(producer)
        if producer.name in IN_BLOCKS and (copies > 1 or is_shared or self.num_uses[producer] > 1):
            return False
        return copies <= MAX_COPIES or producer.name.startswith("broadcast")

    def copies_of(self, producer: Instruction) -> int:
        """How often the code of a producer would be in the kernel."""
        return sum(self.num_copies[user] for user in self.index_users[producer])

    def join(self, one: Instruction) -> None:
        self.num_copies[one] = self.copies_of(one)
        self.num_reductions += one.name in REDUCTIONS
        self.reused.update(one.operands if one in self.reused else (x for x in one.operands if _reuses(one, x)))
        for operand in set(one.operands):
            self.num_uses[operand] += 1
            keeps_index = one.name == "transpose" or operand.shape == one.shape
            self.index_users.setdefault(operand, set()).update(self.index_users[one] if keeps_index else (one,))


def runs_in_library(one: Instruction) -> bool:
    """Whether the library computes it before or after a reduction (openxla/xla, `backends/cpu/ynn_support.cc`)."""
    if one.is_library_reduction or one.role == "bitcast" or one.name in MOVED_IN_LIBRARY:
        return is_fusible(one)
    if one.name == "pad":
        return one.eqn is None or not dilates(one.eqn)
    is_large = max(x.num_elements for x in (one, *one.operands)) >= MIN_LIBRARY_ELEMENTS
    if not (is_fusible(one) and one.name in IN_LIBRARY and is_large):
        return False
    atoms = () if one.eqn is None else (*one.eqn.invars, *one.eqn.outvars)
    return all(jnp.issubdtype(v.aval.dtype, jnp.floating) or v.aval.dtype in (jnp.int8, jnp.uint8) for v in atoms)


def reduces_in_library(eqn: Any, operand: Instruction) -> bool:
    """Whether the library runs a reduction of floats; it sums none of 16 bits."""
    name, dtype = eqn.primitive.name, eqn.outvars[0].aval.dtype
    if operand.num_elements < MIN_LIBRARY_ELEMENTS or not jnp.issubdtype(dtype, jnp.floating):
        return False
    return name in ("reduce_max", "reduce_min") or (name == "reduce_sum" and dtype.itemsize >= 4)


def runs_alone(one: Instruction) -> bool:
    """Whether it is a concatenation that shares no kernel: of many arrays, or along the last dim."""
    if one.name not in ("concatenate", "stack") or one.eqn is None:
        return False
    dim = one.eqn.params.get("dimension", one.eqn.params.get("axis", 0)) % max(1, len(one.shape))
    row_bytes = one.shape[-1] * one.itemsize if one.shape else 0
    is_long = row_bytes >= MIN_ROW_BYTES and one.num_bytes >= MIN_ROWS_BYTES
    return len(one.operands) > MAX_PARTS or (len(one.shape) > 1 and dim == len(one.shape) - 1 and is_long)


def reads_more(one: Instruction) -> bool:
    """Whether an instruction reads several arrays with as many dims as its result, and more elements in all."""
    rank, operands = _true_rank(one), dict.fromkeys(one.operands)
    num_large = sum(not x.name.startswith("broadcast") and x.name != "iota" and _true_rank(x) >= rank for x in operands)
    return num_large > 1 and sum(x.num_elements for x in operands) > one.num_elements


def _reuses(one: Instruction, operand: Instruction) -> bool:
    """Whether an instruction reads elements of an operand more than once."""
    if one.elementwise or one.role == "bitcast":
        return False
    if one.name in ("pad", "dynamic_slice", "dynamic_update_slice"):
        return operand not in one.operands[: 1 + (one.name == "dynamic_update_slice")]
    return one.name == "broadcast_in_dim" or one.name == "tile"


def _updates(root: Instruction, producer: Instruction) -> bool:
    """Whether a kernel writes into what a producer reads elsewhere."""
    if not root.in_place or producer.elementwise or producer.role == "bitcast" or producer.name in SLICES:
        return False
    return any(root.operands[k] in producer.operands for k, _ in root.in_place)


def _true_rank(one: Instruction) -> int:
    return sum(size > 1 for size in one.shape)
