"""The dtypes in which a platform's compiler moves and sums arrays, where it narrows them."""

from __future__ import annotations

import math

from ..graph import Op
from ..hardware import Platform
from ..propagation import Assignment
from ..rewrite.bfloat16_propagation import narrow_reshards, rounded_values, rounds
from ..spec import Spec
from ..xla.collective_lowering import is_slice_wide
from .collective_ledger import Collective
from .complex_parts import COMPLEX, in_parts, sum_in_parts
from .widened_values import MOVED, narrow_dtypes, narrow_maxima


class CollectiveDtypes:
    """XLA:TPU first rounds what is only read in bfloat16, but no reduce-scatter; XLA:GPU widens last."""

    def __init__(self, assignment: Assignment, platform: Platform):
        graph = assignment.graph
        self._graph, self._is_tpu = graph, platform == "tpu"
        rounded = rounded_values(graph) if self._is_tpu else frozenset[int]()
        self._rounded = rounded | narrow_maxima(graph) if self._is_tpu else rounded
        moved = narrow_reshards(assignment) if self._is_tpu else frozenset()
        self._rounded_reshards = moved
        self._widened = narrow_dtypes(graph) if platform == "gpu" else {}
        self._num_devices = math.prod(assignment.sizes.values())

    def of_value(self, collective: Collective, v: int) -> Collective:
        """A collective whose result is a value, in the dtype in which it runs."""
        if self._is_tpu and collective.dtype == COMPLEX:
            return sum_in_parts(collective, self._graph, v)
        is_fused = collective.kind == "reduce-scatter" and not is_slice_wide(collective.num_devices, self._num_devices)
        return in_bfloat16(collective) if v in self._rounded and not is_fused else collective

    def of_operand(self, collective: Collective, op: Op) -> Collective:
        """A collective that moves parts of an op's first operand for it, in the dtype in which it runs."""
        return in_bfloat16(collective) if self._is_tpu and rounds(self._graph, op, 0, self._rounded) else collective

    def of_reshard(self, collective: Collective, v: int, spec: Spec) -> Collective:
        """A collective that moves a value to a spec, in the dtype in which it runs."""
        if v in self._widened and collective.kind in MOVED:
            collective = collective.in_dtype(str(self._widened[v]))
        if self._is_tpu and collective.dtype == COMPLEX:
            return in_parts(collective)
        return in_bfloat16(collective) if (v, spec.axes) in self._rounded_reshards else collective


def in_bfloat16(collective: Collective) -> Collective:
    """The collective of what is rounded first: one of float32 values in bfloat16, any other one as it is."""
    return collective.in_dtype("bfloat16") if collective.dtype == "float32" else collective
