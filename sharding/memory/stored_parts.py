"""What XLA:TPU stores since kernels read or write parts of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .instruction import Instruction, Users
from .primitive_traits import SLICES, reverses_lanes, strided_dims
from .tile_layouts import keeps_tiles

PARTS = SLICES | {"split"}
"""What takes a part of an array."""
JOINS = frozenset({"concatenate", "pad", "stack"})
"""What places arrays in a larger one."""


def in_parts(instructions: Sequence[Instruction], readers: Users) -> Iterator[Instruction]:
    """What XLA:TPU stores since kernels read or write parts of it.

    That is what is padded, concatenated, or sliced in several places or at a distance (not along the last dim), an
    array before and after a slice of it is updated, one reversed along the last dim, and parts that an all-to-all
    receives, joined for several readers.
    """
    for one in instructions:
        is_joined = one.name == "transpose" and any(x.name == "all-to-all" for x in one.operands)
        found = [one] if sum(is_joined or x.name in PARTS for x in readers[one]) > 1 else []
        if one.name in JOINS:
            found += one.operands
        elif one.name == "dynamic_update_slice":
            found += [one, *(one.operands[at] for at, _ in one.in_place)]
        elif one.eqn is not None and one.name in ("rev", "slice"):
            found += [one] if reverses_lanes(one.eqn) else []
            found += one.operands if set(strided_dims(one.eqn)) - {-1} else []
        for x in found:
            while x.role == "bitcast" or keeps_tiles(x):
                x = x.operands[0]
            if not x.is_constant:
                yield x
