"""What kernels of matrix products compute besides the product on XLA:GPU: their operands, and what follows.

An operand is computed from what is read for it, in each product that needs it, if that is no more than the operand
itself. What follows is computed as long as nothing else reads what is before it, and other operands are in memory
(openxla/xla, `service/gpu/transforms/gemm_fusion.cc`, `service/gpu/triton_tiling_propagation.cc`).
"""

from __future__ import annotations

import jax.numpy as jnp

from .instruction import Body, Instruction, Users, users

MOST_OPERANDS = 4
"""That a kernel reads in place of one operand of a product."""

EXCESS_BYTES = 1024
"""By which a kernel may read or write more than without fusion."""

COMPUTED = frozenset(
    """
    abs add add_any cbrt ceil convert_element_type cos div erf exp expm1 floor log log1p logistic max min mul neg rsqrt
    sin sqrt sub tan tanh
    """.split()
)
"""Elementwise primitives that these kernels have."""


def fuse_products(body: Body, *, is_entry: bool = True) -> None:
    """Rewrite a body, its loops and its branches."""
    readers, results = users(body.instructions), {*body.results}
    for one in body.instructions:
        for inner in one.bodies:
            fuse_products(inner, is_entry=False)
        if one.name == "dot_general" and one.role == "unfusible" and not _is_complex(one):
            one.operands = [y for x in one.operands for y in _sources(x, readers, results, is_entry)]
            _append(one, readers, results)


def _is_complex(product: Instruction) -> bool:
    """Whether it is of complex numbers, which these kernels don't have."""
    return product.eqn is not None and jnp.issubdtype(product.eqn.outvars[0].aval.dtype, jnp.complexfloating)


def _sources(x: Instruction, readers: Users, results: set[Instruction], is_entry: bool) -> list[Instruction]:
    """What a product reads in place of an operand."""
    found, waiting = [], [x]
    while waiting:
        one = waiting.pop(0)
        new = [y for y in dict.fromkeys(one.operands) if y not in found and y not in waiting]
        if len(found) + len(waiting) + len(new) <= MOST_OPERANDS and _is_computed(one, readers, results, is_entry):
            waiting += new
        else:
            found.append(one)
    return found


def _is_computed(one: Instruction, readers: Users, results: set[Instruction], is_entry: bool) -> bool:
    """Whether a product's kernel computes it, as an operand."""
    if one.role == "bitcast" or one.name in ("broadcast_in_dim", "transpose"):
        return True
    if one.role != "fusible" or one.name not in COMPUTED:
        return False
    operands = list(dict.fromkeys(one.operands))
    if is_entry and len(operands) == 2 and any(_is_stretched(x, one) and _is_plain_argument(x) for x in operands):
        return True
    if _num_bytes_read(one) <= one.num_bytes + EXCESS_BYTES:
        return True
    alone = [x for x in operands if x.role == "argument" and len(readers[x]) == 1 and x not in results]
    return len(readers[one]) == 1 == len(operands) == len(alone)


def _append(product: Instruction, readers: Users, results: set[Instruction]) -> None:
    """Makes the last instruction that a product's kernel computes the product."""
    last, operands = product, product.operands
    while len(readers[last]) == 1 and last not in results:
        (user,) = readers[last]
        others = [x for x in user.operands if x is not last]
        if user.role == "bitcast":
            break
        if not (user.role == "fusible" and user.name in COMPUTED and user.operands.count(last) == 1):
            break
        is_larger = _num_bytes_read(user) < user.num_bytes - EXCESS_BYTES
        if not all(map(_is_stored, others)) or (is_larger and user not in results):
            break
        last, operands = user, [*operands, *others]
    if last is not product:
        added = range(len(product.operands), len(operands))
        alike = [k for k in added if (operands[k].shape, operands[k].num_bytes) == (last.shape, last.num_bytes)]
        last.name, last.role, last.elementwise, last.operands = product.name, product.role, False, operands
        last.product = product.product
        last.in_place = tuple((k, 0) for k in alike[:1])


def _num_bytes_read(one: Instruction) -> float:
    """Of the operands of an elementwise op, which are all as large as its result."""
    return sum(max(x.num_elements, one.num_elements) * x.itemsize for x in one.operands)


def _is_stretched(x: Instruction, one: Instruction) -> bool:
    """Whether an operand of an elementwise op is broadcast."""
    return x.name == "broadcast_in_dim" or x.num_elements < one.num_elements


def _is_stored(x: Instruction) -> bool:
    """Whether it is in memory, or what it is stretched from."""
    source = _source(x)
    return source is None or source.role in ("argument", "tuple-element", "unfusible")


def _is_plain_argument(x: Instruction) -> bool:
    """Whether it is stretched from an argument, or a constant, that is not reshaped for that."""
    source = _source(x)
    return source is None or (source.role == "argument" and 1 not in source.shape)


def _source(x: Instruction) -> Instruction | None:
    """What it is reshaped or stretched from; None is a constant."""
    while x.role == "bitcast" or x.name == "broadcast_in_dim":
        if not x.operands:
            return None
        x = x.operands[0]
    return x
