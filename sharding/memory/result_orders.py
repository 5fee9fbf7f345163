"""Results of a program that XLA:TPU computes in another order of dims than theirs, and copies in the end.

Results are stored in the order of their dims, and so are arguments, unless tiles add more to them so. Between, a
transpose is another order of what it reads. A product of matrices is written in either order of rows and columns; of
products of stacks, and of arrays of more dims, the leading ones stay as they are in the operand that they come from. If
a transpose of such a product is a result, it is copied. What is computed element by element from arguments alone is
copied where its last dim moves; other dims are moved by the kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

from .dim_orders import UNORDERED, permutation
from .instruction import Body, Instruction
from .tile_layouts import is_row_major

Order = tuple[int, ...]
"""The dims of an array in the order in which they are stored, from the one whose elements are farthest apart."""
Orders = frozenset[Order]
"""Those that an array may be stored in; none if any."""
ANY: Orders = frozenset()


def copy_results(body: Body) -> None:
    """Adds the copies of a program's results."""
    if not any(one.name == "transpose" for one in body.instructions):
        return
    found: dict[Instruction, Orders] = {}
    passed: dict[Instruction, _Passed] = {}
    for one in body.instructions:
        found[one], passed[one] = _orders(one, found), _passed(one, passed)
    copied = {x: _copy(x) for x in body.results if x in found and _is_copied(x, found[x], passed[x])}
    if copied:
        body.results = [copied.get(x, x) for x in body.results]
        body.instructions = [y for x in body.instructions for y in ((x, copied[x]) if x in copied else (x,))]


def _copy(x: Instruction) -> Instruction:
    return Instruction("copy", "unfusible", [x], x.shape, x.num_bytes, value=x.value, eqn=x.eqn, phase=x.phase)


class _Passed(IntEnum):
    """What an array is computed from."""

    MOVED = 0
    """An argument or what a loop returns, in another order."""
    COMPUTED = 1
    """Arguments, element by element."""
    MADE = 2
    """Anything else."""


def _is_copied(one: Instruction, orders: Orders, passed: _Passed) -> bool:
    """Whether a result is computed in another order, and not moved by the kernel that computes it."""
    is_moved = passed is _Passed.MOVED or any(map(one.is_in_order, orders))
    if not orders or is_moved or not is_row_major(one):
        return False
    return passed is _Passed.MADE or all(order[-1] != len(one.shape) - 1 for order in orders)


def _passed(one: Instruction, passed: Mapping[Instruction, _Passed]) -> _Passed:
    if one.role in ("argument", "tuple-element"):
        return _Passed.MOVED
    if one.name == "transpose" or one.role == "bitcast":
        return max((passed[x] for x in one.operands), default=_Passed.MADE)
    operands = [x for x in one.operands if not _is_free(x)]
    if not one.elementwise or any(x.role == "tuple-element" for x in map(_source, operands)):
        return _Passed.MADE
    return max([_Passed.COMPUTED, *(passed[x] for x in operands)])


def _source(x: Instruction) -> Instruction:
    """What a transpose or bitcast is of."""
    while x.operands and (x.name == "transpose" or x.role == "bitcast"):
        x = x.operands[0]
    return x


def _orders(one: Instruction, found: Mapping[Instruction, Orders]) -> Orders:
    if one.role in ("argument", "tuple-element"):
        return frozenset({tuple(range(len(one.shape)))}) if is_row_major(one) else ANY
    if one.name == "transpose" and one.operands:
        moved, (x,) = permutation(one), one.operands
        return frozenset(tuple(moved.index(d) for d in order) for order in found[x]) if moved else ANY
    if one.name == "dot_general" and one.product is not None:
        return _of_product(one, found)
    if one.elementwise:
        return _common([found[x] for x in one.operands if x.shape == one.shape and not _is_free(x)])
    if one.role == "bitcast":
        (x,) = one.operands
        plain = tuple(range(len(x.shape)))
        return frozenset({tuple(range(len(one.shape)))}) if plain in found[x] else ANY
    return ANY


def _common(all_orders: list[Orders]) -> Orders:
    """Those that operands have in common; if none, of one that is not stored in the order of its dims."""
    known = [orders for orders in all_orders if orders]
    if not known:
        return ANY
    return frozenset.intersection(*known) or next(x for x in known if not any(o == tuple(range(len(o))) for o in x))


def _of_product(one: Instruction, found: Mapping[Instruction, Orders]) -> Orders:
    """The orders of a product's result: that of its operands' dims, and of matrices also the transposed one."""
    if one.eqn is None or len(one.operands) != 2 or one.eqn.primitive.name != "dot_general":
        return ANY
    (summed, batch), ndims = one.eqn.params["dimension_numbers"], [len(x.shape) for x in one.operands]
    rows, columns = (n - len(a) - len(b) for n, a, b in zip(ndims, summed, batch, strict=True))
    first = len(batch[0])
    if ndims != [v.aval.ndim for v in one.eqn.invars] or first + rows + columns != len(one.shape):
        return ANY
    if any(found[x] and tuple(range(len(x.shape))) not in found[x] for x in one.operands):
        return ANY  # the compiler may also read it in another order
    dims = tuple(range(len(one.shape)))
    return frozenset({dims, (*dims[:first], *dims[first + rows :], *dims[first : first + rows])})


def _is_free(x: Instruction) -> bool:
    """Whether it is computed in any order."""
    return x.num_elements == 1 or x.name in UNORDERED or x.is_constant
