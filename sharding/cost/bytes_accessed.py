"""Bytes that an op reads and writes on one device.

Counts the op's own operands and results; the caller leaves out what XLA fuses. Ops that only rename data (a reshape, a
bitcast) access none; slices and gathers read only the selected elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol


class Array(Protocol):
    """An abstract value or `jax.ShapeDtypeStruct`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Local shape."""
        ...

    @property
    def dtype(self) -> Any:
        """Element type."""
        ...


Arrays = Sequence[Array]
Params = Mapping[str, Any]
Count = Callable[[Arrays, Arrays, Params], float]
"""(operands, results, the equation's parameters) -> a number of FLOPs or bytes."""


def num_bytes(array: Array) -> float:
    """Bytes of an array; a PRNG key is two words."""
    bits = getattr(array.dtype, "itemsize", None)
    name = str(array.dtype)
    item = 0.5 if name in ("int4", "uint4", "float4_e2m1fn") else bits if bits is not None else 8
    return math.prod(array.shape) * item


def nothing(operands: Arrays, results: Arrays, params: Params) -> float:
    """Zero."""
    return 0


def all_operands(operands: Arrays, results: Arrays, params: Params) -> float:
    """Bytes of all operands."""
    return sum(map(num_bytes, operands))


def all_results(operands: Arrays, results: Arrays, params: Params) -> float:
    """Bytes of all results."""
    return sum(map(num_bytes, results))


def _read_result(operands: Arrays, results: Arrays, params: Params) -> float:
    """As much of the first operand as the result has, and the index operands."""
    return min(all_results(operands, results, params), num_bytes(operands[0])) + sum(map(num_bytes, operands[1:]))


def _read_update(operands: Arrays, results: Arrays, params: Params) -> float:
    """The update and its indices; the array itself is updated in place."""
    return sum(map(num_bytes, operands[1:]))


def _read_scattered(operands: Arrays, results: Arrays, params: Params) -> float:
    """Indices, updates, and the elements that are updated."""
    num_arrays = len(results)
    return sum(map(num_bytes, operands[num_arrays:])) + sum(map(num_bytes, operands[num_arrays + 1 :]))


def _written_update(operands: Arrays, results: Arrays, params: Params) -> float:
    return num_bytes(operands[1])


def _written_scattered(operands: Arrays, results: Arrays, params: Params) -> float:
    return sum(map(num_bytes, operands[len(results) + 1 :]))


RENAMES = frozenset(
    """
    bitcast_convert_type from_edtype layout_constraint name optimization_barrier pbroadcast pin preduced pvary
    random_clone random_unwrap random_wrap reduced_vary_cast reshape reshard squeeze stop_gradient to_edtype unpin
    vary_unreduced_cast with_memory_space_constraint xla_metadata_value
    """.split()
)
"""Ops whose result is the operand under another name."""

GENERATORS = frozenset("iota iota_2x32_shape zeros_like random_seed".split())
"""Ops without memory reads."""

SCATTERS = ("scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul", "scatter-sub")

READ: Mapping[str, Count] = {
    **dict.fromkeys(RENAMES | GENERATORS, nothing),
    **dict.fromkeys(("slice", "dynamic_slice", "gather"), _read_result),
    "dynamic_update_slice": _read_update,
    **dict.fromkeys(SCATTERS, _read_scattered),
}
"""Bytes read, for ops that don't read all operands in full."""

WRITTEN: Mapping[str, Count] = {
    **dict.fromkeys(RENAMES, nothing),
    "dynamic_update_slice": _written_update,
    **dict.fromkeys(SCATTERS, _written_scattered),
}
"""Bytes written, for ops that don't write all results in full."""
