"""Checks the ledger of a case against the program that a compiler makes of it: kinds, counts and bytes are equal."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Literal

import jax
from jax.sharding import NamedSharding

import sharding
from sharding import cost
from sharding.hardware import Platform

from . import prelude
from .case import Case, options_text, spec_text
from .check import Mismatch, Rejected, namespace

CompilerName = Literal["cpu", "v5p", "h100"]
PLATFORMS: dict[CompilerName, Platform] = {"cpu": "cpu", "v5p": "tpu", "h100": "gpu"}
DEVICES = {"v5p": "v5p:2x2x2", "h100": "h100:1x8"}
"""Compiler ahead of time -> the eight devices that it compiles for."""

Totals = dict[str, tuple[int, int]]
"""Kind of collective -> (count, bytes)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The collectives of a case that were predicted and compiled."""

    predicted: Totals
    compiled: Totals
    values: int
    conflicts: int

    @property
    def misses(self) -> list[str]:
        """A line per kind that is not as predicted."""
        kinds = sorted(self.predicted.keys() | self.compiled.keys())
        pairs = [(kind, self.predicted.get(kind, (0, 0)), self.compiled.get(kind, (0, 0))) for kind in kinds]
        return [
            f"{kind} mispredicted: {n} of {size} bytes, compiled {m} of {total}"
            for kind, (n, size), (m, total) in pairs
            if (n, size) != (m, total)
        ]


def check_prediction(
    case: Case, compiler: CompilerName = "cpu", options: dict[str, bool | int] | None = None
) -> Prediction:
    """Compiles a case without running it. Raises Mismatch, Rejected, or any error of the library.

    Args:
        case: the case to compile.
        compiler: XLA:CPU, or a compiler ahead of time.
        options: its options.
    """
    found = predict(case, compiler, options)
    if found.misses:
        raise Mismatch("; ".join(found.misses))
    return found


def predict(case: Case, compiler: CompilerName = "cpu", options: dict[str, bool | int] | None = None) -> Prediction:
    """The collectives of a case, predicted and compiled."""
    names = namespace(case, False)
    args = jax.eval_shape(names["arguments"])
    try:
        jax.jit(names["make"](prelude.plain, jax.jit)).trace(*args)
    except Exception as e:
        raise Rejected(f"{type(e).__name__}: {e}") from e
    devices = jax.devices() if compiler == "cpu" else cost.compile_only(DEVICES[compiler])
    sizes = dict(case.mesh)
    with warnings.catch_warnings(), sharding.mesh(sizes, devices=devices[: math.prod(sizes.values())]) as mesh:
        warnings.filterwarnings("ignore", message=".*XLA pads it")
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        for i, a in enumerate(case.arguments):
            if a.placed is not None:
                placed = NamedSharding(mesh, eval(spec_text(a.placed), names))
                args[i] = jax.ShapeDtypeStruct(args[i].shape, args[i].dtype, sharding=placed)
        asked = eval(f"dict({options_text(case)})", names)
        step = sharding.jit(names["make"](sharding.annotate, sharding.jit), **asked)
        completion = step.complete(*args)
        compiled = step.lower(*args).compile(options)
    ledger = completion.communication().lowered(PLATFORMS[compiler])
    return Prediction(
        predicted={str(kind): total for kind, total in ledger.by_kind().items()},
        compiled={str(kind): total for kind, total in cost.read_compiled(compiled).by_kind().items()},
        values=len(completion.assignment.specs),
        conflicts=len(completion.conflicts),
    )
