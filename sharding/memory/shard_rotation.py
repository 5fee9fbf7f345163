"""Rotations of sharded arrays (`jnp.roll`): the rows that come from another device are sent, and no others."""

from __future__ import annotations

from collections.abc import Sequence

from ..rewrite.rotation import Rotation
from ..spec import Axis, num_parts
from .instruction import Instruction
from .local_op import LocalOp


def rotated(op: LocalOp, by: Rotation, axes: tuple[Axis, ...], length: int) -> Instruction:
    """The shard of a rotated array.

    Args:
        op: its operand is the shard before.
        by: the rotation.
        axes: over which the rotated dim is sharded.
        length: of the whole dim.
    """
    turns = [_turned(op, by.dim, pieces, axes) for pieces in by.pieces(length, num_parts(axes, op.emitter.sizes))]
    return turns[0] if len(turns) == 1 else op.emit("select_n", turns, elementwise=True)


def _turned(op: LocalOp, dim: int, pieces: Sequence[tuple[int, int]], axes: tuple[Axis, ...]) -> Instruction:
    """Rows of one or two shards, concatenated."""
    (x,), emit, parts = op.operands, op.emitter.emit, []
    facts = {"value": x.value, "eqn": op.eqn}
    for k, (rows, away) in enumerate(pieces):
        shape, part = [*x.shape[:dim], rows, *x.shape[dim + 1 :]], x
        if len(pieces) > 1:
            part = emit("slice", "fusible", [x], shape, x.itemsize, key=(dim, k), **facts)
        if away:
            part = emit("collective-permute", "unfusible", [part], shape, x.itemsize, axes=axes, **facts)
        parts.append(part)
    return op.emit("concatenate", parts) if len(parts) > 1 else parts[0]
