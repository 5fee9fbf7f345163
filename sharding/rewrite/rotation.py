"""Rotations: concatenations of two slices of an array, and their gradients, which XLA recognises.

Only the rows that end on another device are sent, by at most two collective-permutes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .. import compat
from ..graph import Graph, Op
from ..spec import Spec


@dataclass(frozen=True, slots=True)
class Rotation:
    """A rotation of an array along a dim, as `jnp.roll` makes it: row i becomes row i + shift."""

    dim: int
    shift: int
    cut: Op
    """One of the ops that slice the array, which is its operand."""

    def pieces(self, length: int, num_shards: int) -> list[list[tuple[int, int]]]:
        """Of what each shard is made, per rotation that XLA does: (rows, how many shards away they are), in order.

        With uneven shards it rotates twice, once past the padding at the end, and selects.
        """
        rows = -(-length // num_shards)
        used = -(-length // rows)  # shards with any rows
        found = []
        for amount in sorted({self.shift, self.shift + used * rows - length}) if self.shift else (0,):
            far, rest = divmod(amount, rows)
            found.append([(n, away % used) for n, away in ((rest, far + 1), (rows - rest, far)) if n])
        return found


def rotations(graph: Graph) -> dict[int, Rotation]:
    """Returns result -> the rotation that makes it, of those that all devices run alike; found once per program."""

    def find() -> dict[int, Rotation]:
        pairs = ((op, _rotation(op, graph.makers)) for op in graph.ops)
        return {op.results[0]: found for op, found in pairs if found is not None and not graph.diverges(op)}

    return graph.once("rotations", find)


def _rotation(op: Op, makers: Mapping[int, Op]) -> Rotation | None:
    if (shift := rotation(op, makers)) is not None:
        return Rotation(dim=op.site[0].params["dimension"], shift=shift, cut=makers[op.operands[0]])
    if (found := rotation_gradient(op, makers)) is not None:
        return Rotation(dim=found[0], shift=found[1], cut=makers[makers[op.operands[0]].operands[0]])
    return None


def rotation(op: Op, makers: Mapping[int, Op]) -> int | None:
    """Returns the shift of a concatenation that rotates an array, whose two slices are its operands; else None."""
    parts = [makers.get(v) for v in op.operands] if op.name == "concatenate" else []
    if len(parts) != 2 or None in parts:
        return None
    last, first = parts
    assert last is not None and first is not None
    if last.name != "slice" or first.name != "slice" or last.operands != first.operands:
        return None
    d, (p, q) = op.site[0].params["dimension"], (part.site[0].params for part in (last, first))
    starts, ends = p["start_indices"], q["limit_indices"]
    others = [k for k in range(len(starts)) if k != d]
    same = all(p[key][k] == q[key][k] for key in ("start_indices", "limit_indices") for k in others)
    steps = {*(p["strides"] or ()), *(q["strides"] or ())}
    if not same or steps - {1} or q["start_indices"][d] or ends[d] != starts[d]:
        return None
    return (p["limit_indices"][d] - starts[d]) % p["limit_indices"][d]


def rotation_gradient(op: Op, makers: Mapping[int, Op]) -> tuple[int, int] | None:
    """Returns (dim, shift) of a sum that rotates an array, whose two parts are its padded operands; else None.

    The gradient of a rotation is such a sum.
    """
    pads = [makers[v] for v in op.operands if v in makers] if op.name in ("add", "add_any") else []
    if len(pads) != 2 or any(pad.name != "pad" or not _is_zero(pad.site[0].invars[1]) for pad in pads):
        return None
    cuts = [makers.get(pad.operands[0]) for pad in pads]
    if (
        any(cut is None or cut.name not in ("slice", "split") for cut in cuts)
        or len({_source(c) for c in cuts if c}) > 1
    ):
        return None
    first, last = ([tuple(map(int, widths)) for widths in pad.site[0].params["padding_config"]] for pad in pads)
    rotated = [d for d, pair in enumerate(zip(first, last, strict=True)) if pair != ((0, 0, 0), (0, 0, 0))]
    if len(rotated) != 1:
        return None
    (d,) = rotated
    (low, high, inside), (other_low, other_high, other_inside) = first[d], last[d]
    length = op.site[0].outvars[0].aval.shape[d]
    one_sided = not inside and not other_inside and low * high == other_low * other_high == 0
    fit = one_sided and low + high + other_low + other_high == length and bool(low) != bool(other_low)
    return (d, max(low, other_low)) if fit else None


def _is_zero(atom: Any) -> bool:
    return compat.is_literal(atom) and not atom.val


def _source(op: Op) -> int:
    return op.operands[0]


def rotation_parts(op: Op, makers: Mapping[int, Op]) -> Iterator[Op]:
    """Yields the ops inside a rotation; XLA recognises the rotation if their results are unconstrained."""
    if rotation(op, makers) is not None:
        yield from (makers[v] for v in op.operands)
    elif rotation_gradient(op, makers) is not None:
        for pad in (makers[v] for v in op.operands):
            yield from (pad, makers[pad.operands[0]])


def rotated_specs(graph: Graph, specs: Sequence[Spec]) -> dict[int, Spec]:
    """Returns slice of a rotated array -> the spec of the rotation, in which XLA needs the array, too."""
    uniform = (op for op in graph.ops if not graph.diverges(op))
    parts = (
        (op, part) for op in uniform for part in rotation_parts(op, graph.makers) if part.name in ("slice", "split")
    )
    return {v: specs[op.results[0]] for op, part in parts for v in part.results}
