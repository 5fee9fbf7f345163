"""What XLA:TPU's tiles add to arrays.

The two minor dims of an array are stored in tiles, of 8 by 128 elements if they are as large, and padded to whole ones.
The compiler orders dims so that this adds least, unless an op needs some to be minor: a product of many matrices needs
theirs, a convolution batch and features, a gather or scatter those of rows, a decomposition its matrices'. What is
computed from that element by element is stored alike.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..rewrite.bfloat16_propagation import PRODUCTS, is_default
from .instruction import Body, Instruction, array_bytes, users, users_of
from .primitive_traits import strided_dims

LANES = 128
SUBLANES = 8
LINE = SUBLANES * LANES
"""Most elements of a tile of an array of one dim."""
MATRICES = frozenset("cholesky eigh lu svd triangular_solve tridiagonal_solve".split())
"""Primitives that a library runs on matrices in row-major order."""
REFLECTIONS = frozenset("geqrf householder_product ormqr qr".split())
"""Those that it runs on columns."""


@dataclass(frozen=True, slots=True)
class Minor:
    """Which dims of an array may be minor: one stored along the lanes of tiles, another along their sublanes."""

    lanes: frozenset[int]
    sublanes: frozenset[int]


Carried = Mapping[Instruction, Mapping[int, Minor]]
"""Loop -> the number of an operand that it carries -> its dims that must be minor."""


def pad_tiles(body: Body) -> None:
    """Sets what tiles add to each array of a program.

    Its arguments and results are stored as takes least, and copied where products or what makes them need more.
    """
    minors = _pad(body)
    for one in (*body.arguments, *body.results):
        one.padding = padded_bytes(one.shape, one.itemsize) - one.num_bytes
    for k, one in enumerate(body.results):
        if one.role != "argument" and one in minors and _added(one, minors[one]) > one.padding:
            made = body.results[k] = _copy(one, one.itemsize)
            made.padding, one.padding = one.padding, _added(one, minors[one])
            body.instructions.append(made)
    reading = users_of(body.arguments, [x for x in body.instructions if x.name in PRODUCTS])
    for one in body.arguments:
        products = reading[one]
        if products and one in minors and _added(one, minors[one]) > one.padding:
            made = _copy(one, 2 if all(map(rounds, products)) else one.itemsize)
            made.padding = _added(made, minors[one])
            body.instructions.insert(body.instructions.index(products[0]), made)
            for x in products:
                x.operands = [made if operand is one else operand for operand in x.operands]


def _added(one: Instruction, minor: Minor) -> int:
    """Bytes that tiles add to an array with given minor dims."""
    return padded_bytes(one.shape, one.itemsize, minor) - one.num_bytes


def _copy(x: Instruction, itemsize: float) -> Instruction:
    """A copy of an array, possibly rounded."""
    itemsize = min(itemsize, x.itemsize)
    return Instruction(
        "copy", "unfusible", [x], x.shape, array_bytes(x.num_elements, itemsize), value=x.value, eqn=x.eqn
    )


def rounds(product: Instruction) -> bool:
    """Whether a product reads 32-bit floats as 16-bit ones."""
    return product.eqn is not None and is_default(product.eqn.params.get("precision"))


def _pad(body: Body) -> Mapping[Instruction, Minor]:
    """Sets what tiles add to each array of a body and of those in it; returns the dims that must be minor."""
    minors = _minors(body, {one: _carried(one) for one in body.instructions if one.bodies})
    for one in body.instructions:
        one.padding = padded_bytes(one.shape, one.itemsize, minors.get(one)) - one.num_bytes
    return minors


def _carried(loop: Instruction) -> dict[int, Minor]:
    """The number of an operand that a loop carries -> its dims that must be minor for what makes the next one."""
    found: dict[int, Minor] = {}
    for body in loop.bodies:
        _pad(body)
        own = ((at, _own_minor(body.results[k], {})) for at, k in loop.in_place)
        found |= {at: minor for at, minor in own if minor is not None}
    return found


@functools.cache
def padded_bytes(shape: tuple[int, ...], itemsize: float, minor: Minor | None = None) -> int:
    """Bytes of an array in tiles, its dims ordered so that they are fewest.

    Args:
        shape: its shape.
        itemsize: bytes per element.
        minor: the dims that may be minor. Default: any.
    """
    num_bytes = array_bytes(math.prod(shape), itemsize)
    if num_bytes == 0 or not shape:
        return num_bytes
    if len(shape) == 1:
        return array_bytes(_up(shape[0], min(LINE, max(LANES, _power(shape[0])))), itemsize)
    every = frozenset(range(len(shape)))
    lanes, sublanes = (every, every) if minor is None else (minor.lanes or every, minor.sublanes or every)
    least = max(1, int(4 / itemsize))  # rows that share a register's 32 bits
    ratios = [
        _up(shape[a], LANES) / shape[a] * (_up(shape[b], min(SUBLANES, max(least, _power(shape[b])))) / shape[b])
        for a in lanes
        for b in sublanes
        if a != b
    ]
    return round(num_bytes * min(ratios, default=1.0))


def is_row_major(one: Instruction) -> bool:
    """Whether tiles add least to an array in the order of its dims, in which arguments and results then are stored."""
    if len(one.shape) < 2:
        return True
    return _added(one, _row_major(one.shape)) == padded_bytes(one.shape, one.itemsize) - one.num_bytes


def keeps_tiles(one: Instruction) -> bool:
    """Whether it is a slice that leaves out no tile of its operand: the start of it, under another shape."""
    if one.name != "slice" or one.eqn is None or one.eqn.primitive.name != "slice":
        return False
    source, tiles = one.operands[0].shape, (SUBLANES, LANES)[-len(one.shape) :]
    if any(one.eqn.params["start_indices"]) or strided_dims(one.eqn) or source[:-2] != one.shape[:-2]:
        return False
    return all(_up(x, n) == _up(y, n) for x, y, n in zip(source[-2:], one.shape[-2:], tiles, strict=True))


def _minors(body: Body, carried: Carried) -> Mapping[Instruction, Minor]:
    """The dims that must be minor, for arrays that some op constrains."""
    found: dict[Instruction, Minor] = {}
    for one in body.instructions:
        own = _own_minor(one, carried)
        if own is None and one.elementwise:
            own = next((found[x] for x in one.operands if x in found and x.shape == one.shape), None)
        if own is not None:
            found[one] = own
    readers = users(body.instructions)
    for one in reversed(body.instructions):
        if one not in found:
            needed = next((need for x in readers[one] for need in _needed(x, one, found, carried)), None)
            if needed is not None:
                found[one] = needed
    return found


def _needed(
    reader: Instruction, x: Instruction, found: Mapping[Instruction, Minor], carried: Carried
) -> Iterable[Minor]:
    """The dims of an operand that must be minor for its reader."""
    if reader.elementwise:
        if reader in found and reader.shape == x.shape:
            yield found[reader]
        return
    for number, operand in enumerate(reader.operands):
        if operand is x:
            own = carried[reader].get(number) if reader in carried else _minor(reader, number)
            yield from () if own is None else (own,)


def _own_minor(one: Instruction, carried: Carried) -> Minor | None:
    """The dims of its result that an op needs to be minor."""
    if one.role == "tuple-element" and one.operands[0] in carried:
        source = one.operands[0]
        return next((carried[source].get(at) for at, k in source.in_place if k == one.element), None)
    return _minor(one, None)


def _minor(one: Instruction, operand: int | None) -> Minor | None:
    """The dims that an op needs to be minor, of its result or of an operand."""
    if one.name == "dot_general":
        return _of_product(one, operand)
    if one.name == "conv_general_dilated":
        return _of_convolution(one, operand)
    if one.name in MATRICES:
        shape = _array(one, operand).shape
        return _row_major(shape) if len(shape) > 1 else None
    if one.name in REFLECTIONS:
        ndim = len(_array(one, operand).shape)
        return Minor(frozenset({ndim - 2}), frozenset({ndim - 1})) if ndim > 2 else None
    if one.name == "gather" or one.name.startswith("scatter"):
        return _of_rows(one, operand)
    return None


def _array(one: Instruction, operand: int | None) -> Instruction:
    """The result of an op, which is itself, or an operand."""
    return one if operand is None else one.operands[operand]


def _of_rows(one: Instruction, operand: int | None) -> Minor | None:
    """The dims of rows that are gathered or scattered, in any order, of the result or of an operand.

    If each row of a batch has indices of its own, the compiler is free.
    """
    eqn, shape = one.eqn, _array(one, operand).shape
    if eqn is None or not eqn.primitive.name.startswith(("gather", "scatter")):
        return None
    numbers, is_gather = eqn.params["dimension_numbers"], one.name == "gather"
    ndim = (eqn.outvars[0] if operand is None else eqn.invars[operand]).aval.ndim
    if len(one.operands) != len(eqn.invars) or len(shape) != ndim or numbers.operand_batching_dims:
        return None
    taken = numbers.collapsed_slice_dims if is_gather else numbers.inserted_window_dims
    windows = {
        0: [d for d in range(len(shape)) if d not in taken],
        2: [] if is_gather else numbers.update_window_dims,
        None: numbers.offset_dims if is_gather else [d for d in range(len(shape)) if d not in taken],
    }
    dims = frozenset(d for d in windows.get(operand, ()) if shape[d] > 1)
    return Minor(dims, dims if len(dims) > 1 else frozenset(range(len(shape))) - dims) if dims else None


def _row_major(shape: tuple[int, ...]) -> Minor:
    """The last dim is along the lanes, the one before along the sublanes."""
    return Minor(frozenset({len(shape) - 1}), frozenset({len(shape) - 2}))


def _of_product(one: Instruction, operand: int | None) -> Minor | None:
    """The dims of matrices that are multiplied, one by one, of the result or of an operand.

    Products with vectors are reductions, for which the compiler is free.
    """
    batch, free = product_dims(one)
    if not batch[0] or not all(any(x.shape[d] > 1 for d in dims) for x, dims in zip(one.operands, free, strict=True)):
        return None
    count, own = (len(one.shape), batch[0]) if operand is None else (len(one.operands[operand].shape), batch[operand])
    batched = range(len(own)) if operand is None else own
    dims = frozenset(range(count)) - {*batched}
    return Minor(dims, dims)


def product_dims(one: Instruction) -> tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]]:
    """Of both operands of a product, the dims that are multiplied one by one, and those of rows and columns.

    None of other ops, or if operands have other dims than in the program.
    """
    none: Sequence[Sequence[int]] = ((), ())
    if one.eqn is None or len(one.operands) != 2 or one.eqn.primitive.name != "dot_general":
        return none, none
    (summed, batch), ndims = one.eqn.params["dimension_numbers"], [len(x.shape) for x in one.operands]
    if ndims != [v.aval.ndim for v in one.eqn.invars]:
        return none, none
    free = [[d for d in range(n) if d not in (*a, *b)] for n, a, b in zip(ndims, summed, batch, strict=True)]
    return batch, free


def _of_convolution(one: Instruction, operand: int | None) -> Minor | None:
    """The dims of a convolution's batch and features, or of a kernel's features, of the result or of an operand."""
    if one.eqn is None or len(one.operands) != 2 or one.eqn.primitive.name != "conv_general_dilated":
        return None
    numbers = one.eqn.params["dimension_numbers"]
    spec = numbers.out_spec if operand is None else (numbers.lhs_spec, numbers.rhs_spec)[operand]
    if len(spec) != len(_array(one, operand).shape):
        return None
    dims = frozenset(spec[:2])
    return Minor(dims, dims)


def _power(size: int) -> int:
    """The next power of two."""
    return 1 << max(0, size - 1).bit_length()


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
