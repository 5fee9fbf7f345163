"""The order in which XLA:GPU stores the dims of arrays: that of what they are computed from, which moves least data.

Arguments, results, and what libraries and loops make are stored in the order of their dims, what collectives move as it
was before (openxla/xla, `service/layout_assignment.cc`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .instruction import Body, Instruction
from .primitive_traits import REDUCTIONS, SLICES

UNORDERED = frozenset({"broadcast", "broadcast_in_dim", "iota"})
"""What is computed in any order."""


def settle_layouts(body: Body) -> None:
    """Sets the layouts of a body's instructions, and of those of its nested bodies."""
    plain = {*body.results, *(x for one in body.instructions if one.bodies for x in one.operands)}
    for one in body.instructions:
        one.layout = () if one in plain else _layout(one)
        for inner in one.bodies:
            settle_layouts(inner)


def is_transposing(one: Instruction) -> bool:
    """Whether an op reads an array in another order than that of its result."""
    if one.name == "transpose" and one.role == "fusible" and one.operands:
        return one.layout != _layout(one) or not permutation(one)
    return one.elementwise and any(x.layout != one.layout for x in _alike(one))


def transposed(one: Instruction) -> tuple[int, ...]:
    """The sizes of a transpose's operand as stored, and their order in the result; () if the last of them stays."""
    if one.name != "transpose" or not is_transposing(one) or not (moved := permutation(one)):
        return ()
    (x,) = one.operands
    old = [d for d in stored_order(x) if x.shape[d] > 1]
    new = [moved[d] for d in stored_order(one) if one.shape[d] > 1]
    return (*(x.shape[d] for d in old), *map(old.index, new)) if old[-1:] != new[-1:] else ()


def stored_order(x: Instruction) -> Sequence[int]:
    """The dims of an array in the order in which they are stored."""
    return x.layout or range(len(x.shape))


def _layout(one: Instruction) -> tuple[int, ...]:
    """That in which an op computes its result as its operands are stored."""
    if not one.operands:
        return ()
    (x, *_) = one.operands
    if one.role not in ("fusible", "bitcast"):
        return x.layout if one.num_devices and len(one.operands) == 1 and len(x.shape) == len(one.shape) else ()
    if one.elementwise:
        found = {x.layout for x in _alike(one)}
        return found.pop() if len(found) == 1 else ()
    if not x.layout and one.name != "transpose":
        return ()
    if one.name == "transpose":
        moved = permutation(one) if one.role == "fusible" else ()  # else a product writes it so
        return _named(moved.index(d) for d in stored_order(x)) if moved else ()
    if one.name in REDUCTIONS and one.eqn is not None:
        axes = one.eqn.params.get("axes", ())
        kept = [d for d in range(len(x.shape)) if d not in axes]
        return _named(kept.index(d) for d in stored_order(x) if d in kept) if len(kept) == len(one.shape) else ()
    if one.role == "bitcast":
        return _through_reshape(one, x)
    return x.layout if one.name in SLICES and len(one.shape) == len(x.shape) else ()


def permutation(one: Instruction) -> tuple[int, ...]:
    """The order of a transpose's operand's dims; () if the op does something else."""
    if one.name != "transpose" or one.eqn is None or not one.operands:
        return ()
    moved = tuple(one.eqn.params.get("permutation", ()))
    (x, *_) = one.operands
    is_so = len(moved) == len(x.shape) and tuple(x.shape[d] for d in moved) == one.shape
    return moved if is_so else ()


def _through_reshape(one: Instruction, x: Instruction) -> tuple[int, ...]:
    """That of an array from which dims of size 1 are taken, or to which some are added."""
    large, new = ([d for d, size in enumerate(y.shape) if size > 1] for y in (x, one))
    if [x.shape[d] for d in large] != [one.shape[d] for d in new]:
        return ()
    order = [new[large.index(d)] for d in stored_order(x) if d in large]
    return _named([*(d for d in range(len(one.shape)) if d not in new), *order])


def _named(order: Iterable[int]) -> tuple[int, ...]:
    found = tuple(order)
    return () if found == tuple(range(len(found))) else found


def _alike(one: Instruction) -> list[Instruction]:
    """The operands of an elementwise op that are stored in some order."""
    return [x for x in one.operands if x.shape == one.shape and x.name not in UNORDERED]
