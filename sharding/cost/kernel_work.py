"""Work of kernels: of their bodies, which cost models of compilers don't see.

A `pallas_call` does what its `cost_estimate` says, or else what its body does, once for each program of its grid. The
function of a `kernel_call` does what its equations do.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from .. import compat
from .bytes_accessed import Arrays, Params

PALLAS = frozenset({"mpmd_map", "pallas_call"})
"""Primitives of Pallas kernels; `mpmd_map` is that of GPU kernels."""

KERNELS = PALLAS | {"kernel_call"}

ACCESSES = frozenset("addupdate axis_index get num_programs program_id swap".split())
"""Primitives in the body of a kernel without arithmetic."""

COPIES = "copy_", "barrier_", "commit_", "wait_"
"""What the names of a GPU kernel's copies and of its waits for them begin with."""

TRANSCENDENTAL_FLOPS = 10
"""FLOPs of each transcendental op that a `cost_estimate` counts."""


@dataclass(frozen=True, slots=True)
class Flops:
    """FLOPs of a kernel."""

    total: float = 0
    matmul_dtype: str | None = None
    """The operands' dtype of its matmuls; None without any."""

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.total + other.total, self.matmul_dtype or other.matmul_dtype)

    def times(self, n: float) -> Flops:
        """Those of `n` runs."""
        return Flops(n * self.total, self.matmul_dtype)


_OF_CALLS: WeakKeyDictionary[Any, Flops] = WeakKeyDictionary()
"""A `KernelCall` -> FLOPs at the shapes that it was first traced at."""

OfEquation = Callable[[str, Arrays, Arrays, Params], Flops]
"""(primitive, operands, results, parameters) -> FLOPs of an equation without a body."""


def kernel_flops(primitive: str, operands: Arrays, params: Params, of_equation: OfEquation) -> Flops:
    """FLOPs of a kernel on one device.

    Args:
        primitive: one of `KERNELS`.
        operands: local shapes and dtypes.
        params: the parameters of the equation.
        of_equation: counts the FLOPs of equations without a body.
    """
    if primitive == "kernel_call":
        call = params["call"]
        whole, share = call.whole(operands)
        if call not in _OF_CALLS:
            _OF_CALLS[call] = _body(whole, of_equation)
        return _OF_CALLS[call].times(share)
    estimate = params["cost_estimate"]
    bodies = params["jaxprs"] if primitive == "mpmd_map" else [params["jaxpr"]]
    counted = functools.reduce(Flops.__add__, (_body(one, of_equation) for one in bodies), Flops())
    if estimate is None:
        return counted.times(_programs(primitive, params))
    return Flops(estimate.flops + TRANSCENDENTAL_FLOPS * estimate.transcendentals, counted.matmul_dtype)


def _programs(primitive: str, params: Mapping[str, Any]) -> int:
    """The number of programs; a bound that is only known when it runs counts as 1."""
    if primitive == "mpmd_map":
        return math.prod(n for mesh in params["meshes"] for n in mesh.shape.values())
    return math.prod(n for n in params["grid_mapping"].grid if isinstance(n, int))


def _body(jaxpr: Any, of_equation: OfEquation) -> Flops:
    found = Flops()
    for eqn in compat.open_jaxpr(jaxpr).eqns:
        name = eqn.primitive.name
        if name in ACCESSES or name.startswith(COPIES):
            continue
        operands, results = [v.aval for v in eqn.invars], [v.aval for v in eqn.outvars]
        inner = [body for _, _, body in compat.sub_jaxprs(eqn.params)]
        if name in KERNELS:
            found += kernel_flops(name, operands, eqn.params, of_equation)
        elif name == "cond":
            found += max((_body(one, of_equation) for one in inner), key=lambda flops: flops.total)
        elif inner:
            each = functools.reduce(Flops.__add__, (_body(one, of_equation) for one in inner))
            found += each.times(eqn.params["length"] if name == "scan" else 1)
        else:
            found += of_equation(name, operands, results, eqn.params)
    return found
