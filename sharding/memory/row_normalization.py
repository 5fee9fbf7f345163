"""Kernels of XLA:TPU that reduce rows and compute with the result, such as a row less its maximum, in a softmax.

The kernel goes on with elementwise ops, and stores what several others read: the exponentials of a softmax, whose sum
it computes beside.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from .instruction import Instruction, Users
from .primitive_traits import REDUCTIONS
from .product_ends import is_product

MOST_IN_ROW = 8192
"""Elements of a row that a kernel holds."""
CONVERT = "convert_element_type"
PASSED_ON = frozenset({"broadcast_in_dim", "max", "reshape", "squeeze", "stop_gradient"})
"""What may be between a reduction and what reads it: a softmax bounds its maximum."""
LEAST_DIMS = 3
"""Of an array, each of more than one element; there are no others, but such as a product drops."""


@dataclass(slots=True)
class Rows:
    """What the kernels that reduce rows store."""

    ends: list[Instruction] = field(default_factory=list)
    """Reductions that end a kernel, and what the others store for several readers."""
    held: set[Instruction] = field(default_factory=set)
    """What only kernels that go on read, and so compute."""


def rows(
    instructions: Sequence[Instruction],
    readers: Users,
    stored: Collection[Instruction],
    ends: Mapping[Instruction, Collection[Instruction]],
) -> Rows:
    """What kernels that reduce rows store.

    Args:
        instructions: operands before their users.
        readers: of each.
        stored: in any case.
        ends: last op in the kernel of a product -> what runs there.
    """
    after_products = {x for end, inside in ends.items() for x in inside if not is_product(x)}
    found, passed = Rows(), set[Instruction]()
    for one in instructions:
        if one.name not in REDUCTIONS or one in passed:
            continue
        end = _end(one, readers, stored, passed) if _is_row(one, after_products) else None
        if end is None:
            found.ends.append(one)
            continue
        found.ends.append(end)
        if one.operands[0] not in stored and len(readers[one.operands[0]]) == 2:
            found.held.add(one.operands[0])
    return found


def _is_row(one: Instruction, after_products: Collection[Instruction]) -> bool:
    """Whether a kernel may hold the rows that a reduction sums."""
    (x, *others) = one.operands
    if others or sum(n > 1 for n in x.shape) < LEAST_DIMS or x.num_elements // one.num_elements > MOST_IN_ROW:
        return False
    if min(x.shape) == 1 and not (x in after_products and _is_written_so(x)):
        return False
    axes = () if one.eqn is None else one.eqn.params.get("axes", ())
    if len(axes) != 1 or axes[0] < len(x.shape) - 2:
        return False
    return x.name != CONVERT and (x not in after_products or _is_widened(x))


def _is_written_so(x: Instruction) -> bool:
    """Whether each dim of one element is one of the program, and none of a part on one device."""
    shape = () if x.eqn is None else x.eqn.outvars[0].aval.shape
    return [n == 1 for n in shape] == [n == 1 for n in x.shape]


def _is_widened(x: Instruction) -> bool:
    """Whether an elementwise op after a product comes after a conversion to a wider type."""
    found: Instruction | None = x
    while found is not None and not is_product(found):
        if found.name == CONVERT:
            return True
        found = next((y for y in found.operands if y.num_elements == found.num_elements and y.operands), None)
    return False


def _end(
    one: Instruction, readers: Users, stored: Collection[Instruction], passed: set[Instruction]
) -> Instruction | None:
    """What the kernel of a reduction that goes on stores, if it does: the last elementwise op before several readers.

    Another reduction that goes on alike may follow inside: see `passed`.
    """
    end = _elementwise(_reader_with(one, readers), readers, stored)
    if end is None or (len(readers[end]) < 2 and end not in stored):
        return None
    sums = [x for x in readers[end] if x.name in REDUCTIONS]
    last = _elementwise(_reader_with(sums[0], readers), readers, stored) if len(sums) == 1 else None
    if last is not None and len(readers[end]) == 2 and (len(readers[last]) > 1 or last in stored):
        passed.add(sums[0])
        return last
    return end


def _elementwise(one: Instruction | None, readers: Users, stored: Collection[Instruction]) -> Instruction | None:
    """The last of the elementwise ops after one that each alone reads the one before."""
    while one is not None and one not in stored and len(readers[one]) == 1:
        (reader,) = readers[one]
        if not reader.elementwise or reader.shape != one.shape:
            break
        one = reader
    return one


def _reader_with(reduced: Instruction, readers: Users) -> Instruction | None:
    """The only op that reads a reduction, broadcast, together with what it reduces."""
    x = reduced.operands[0]
    while len(readers[reduced]) == 1:
        (reader,) = readers[reduced]
        if x in reader.operands and reader.elementwise and reader.shape == x.shape:
            return reader
        if reader.name not in PASSED_ON:
            return None
        reduced = reader
    return None
