"""Results of a program that XLA:TPU computes in another order of dims than theirs, and copies in the end.

Results are stored in the order of their dims, and so are arguments, unless tiles add more to them so. Between, a
transpose is another order of what it reads. Kernels that read arguments also move dims other than the last one, those
of products write some orders (`_of_product`). Where that does not do, the result, or an argument, is copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum

from .dim_orders import UNORDERED, permutation
from .instruction import Body, Instruction
from .tile_layouts import is_row_major, product_dims

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
        found[one], passed[one] = _orders(one, found, passed), _passed(one, passed)
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


def _orders(one: Instruction, found: Mapping[Instruction, Orders], passed: Mapping[Instruction, _Passed]) -> Orders:
    if one.role in ("argument", "tuple-element"):
        return frozenset({tuple(range(len(one.shape)))}) if is_row_major(one) else ANY
    if one.name == "transpose" and one.operands:
        moved, (x,) = permutation(one), one.operands
        if x.name == "all-to-all":
            return _of_parts(x, one)
        return frozenset(tuple(moved.index(d) for d in order) for order in found[x]) if moved else ANY
    if one.name == "dot_general" and one.product is not None:
        return _of_product(one, found)
    if one.elementwise:
        alike = {x: found[x] for x in one.operands if x.shape == one.shape and found[x] and not _is_free(x)}
        made = [orders for x, orders in alike.items() if passed[x] is _Passed.MADE]
        return _common(made or [*alike.values()], [*alike.values()])
    if one.role == "bitcast":
        is_plain = any(map(_is_plain, found[one.operands[0]]))
        return frozenset({tuple(range(len(one.shape)))}) if is_plain else ANY
    return ANY


def _common(strict: Sequence[Orders], all_orders: Sequence[Orders]) -> Orders:
    """Those that some arrays have in common, of all the last dim; if none, of one that is not stored in order."""
    if not strict:
        return ANY
    common = frozenset.intersection(*strict) or next(x for x in strict if not any(map(_is_plain, x)))
    kept = frozenset(o for o in common if all(any(o[-1:] == p[-1:] for p in orders) for orders in all_orders))
    return kept or common


def _of_product(one: Instruction, found: Mapping[Instruction, Orders]) -> Orders:
    """The orders of a product's result: stacks first, then rows and columns as in their operands, or the other way.

    Of an operand's rows, the longest dim may also be the last one: it goes along the sublanes of tiles.
    """
    batch, (left, right) = product_dims(one)
    first = len(batch[0])
    if first + len(left) + len(right) != len(one.shape) or not one.shape or not all(found[x] for x in one.operands):
        return ANY
    rows = {tuple(first + left.index(d) for d in order if d in left) for order in found[one.operands[0]]}
    longest = max(range(first, first + len(left)), key=lambda d: (one.shape[d], d), default=first)
    rows |= {(*(d for d in dims if d != longest), longest) for dims in rows if dims}
    start = first + len(left)
    columns = {tuple(start + right.index(d) for d in order if d in right) for order in found[one.operands[1]]}
    stacks = tuple(range(first))
    return frozenset(
        (*stacks, *dims) for row in rows for column in columns for dims in ((*row, *column), (*column, *row))
    )


def _of_parts(parts: Instruction, joined: Instruction) -> Orders:
    """The order in which parts of rows are joined that an all-to-all receives; any if they are of another dim."""
    if parts.shape[-1] == joined.shape[-1]:
        return ANY
    *rest, rows, columns = range(len(joined.shape))
    return frozenset({(*rest, columns, rows)})


def _is_plain(order: Order) -> bool:
    return order == tuple(range(len(order)))


def _is_free(x: Instruction) -> bool:
    """Whether it is computed in any order."""
    return x.num_elements == 1 or x.name in UNORDERED
