"""Rotations of sharded arrays (`jnp.roll`): the rows that come from another device are sent, and no others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..rewrite.rotation import Rotation
from ..spec import Axis, num_parts
from .emitter import Emitter
from .instruction import Instruction


def rotated(
    x: Instruction, by: Rotation, axes: tuple[Axis, ...], length: int, value: int | None, eqn: Any, emitter: Emitter
) -> Instruction:
    """The shard of a rotated array.

    Args:
        x: the shard before.
        by: the rotation.
        axes: over which the rotated dim is sharded.
        length: of the whole dim.
        value: of the graph, and its equation.
        eqn: likewise.
    """
    turns = [_turned(x, by.dim, pieces, axes, value, eqn, emitter) for pieces in _pieces(by, axes, length, emitter)]
    if len(turns) == 1:
        return turns[0]
    return emitter.emit("select_n", "fusible", turns, x.shape, x.itemsize, elementwise=True, value=value, eqn=eqn)


def _pieces(by: Rotation, axes: Sequence[Axis], length: int, emitter: Emitter) -> list[list[tuple[int, int]]]:
    return by.pieces(length, num_parts(axes, emitter.sizes))


def _turned(
    x: Instruction,
    dim: int,
    pieces: Sequence[tuple[int, int]],
    axes: tuple[Axis, ...],
    value: int | None,
    eqn: Any,
    emitter: Emitter,
) -> Instruction:
    """Rows of one or two shards, concatenated."""
    facts, parts = {"value": x.value, "eqn": eqn}, []
    for k, (rows, away) in enumerate(pieces):
        shape, part = [*x.shape[:dim], rows, *x.shape[dim + 1 :]], x
        if len(pieces) > 1:
            part = emitter.emit("slice", "fusible", [x], shape, x.itemsize, key=(dim, k), **facts)
        if away:
            part = emitter.emit("collective-permute", "unfusible", [part], shape, x.itemsize, axes=axes, **facts)
        parts.append(part)
    facts["value"] = value
    return emitter.emit("concatenate", "fusible", parts, x.shape, x.itemsize, **facts) if len(parts) > 1 else parts[0]
