"""Checks the ledger of a case against the program that a compiler makes of it: kinds, counts and bytes are equal."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import jax
from jax.sharding import NamedSharding

from sharding import cost
from sharding.hardware import Platform

from . import prelude
from .case import Case, call_text, mesh_text, placing_alone_text, placing_text, static_text
from .check import Mismatch, Rejected, jitted, namespace, on_mesh

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


@contextlib.contextmanager
def ahead_of_time(case: Case, compiler: CompilerName) -> Iterator[dict[str, Any]]:
    """Enters the mesh over devices of a compiler ahead of time; yields the namespace with abstract arguments."""
    names = namespace(case, False)
    names |= {"devices": cost.compile_only(DEVICES[compiler]), "placed": _placed}
    with eval(mesh_text(case, "devices"), names) as mesh:
        names["mesh"] = mesh if mesh is not None else jax.sharding.get_mesh()
        static = {i: x for i, x in enumerate(names["arguments"]()) if isinstance(x, int)}
        names["args"] = [static.get(i, x) for i, x in enumerate(jax.eval_shape(names["arguments"]))]
        for line in placing_text(case, "placed"):
            exec(line, names)
        yield names


def _placed(x: jax.ShapeDtypeStruct, on: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on)


def predict(case: Case, compiler: CompilerName = "cpu", options: dict[str, bool | int] | None = None) -> Prediction:
    """The collectives of a case, predicted and compiled."""
    names = namespace(case, False)
    names["args"] = names["arguments"]()
    for line in placing_alone_text(case):
        exec(line, names)
    static = eval(f"dict({static_text(case)})", names)
    names["step"] = jax.jit(names["make"](prelude.plain, jax.jit), **static)
    try:
        eval(f"step.trace({call_text(case)})", names)
    except Exception as e:
        raise Rejected(f"{type(e).__name__}: {e}") from e
    if compiler != "cpu" and any(a.type.place == "ref" for a in case.arguments):
        raise Rejected("an argument that only exists on devices")
    entered = on_mesh(case) if compiler == "cpu" else ahead_of_time(case, compiler)
    with warnings.catch_warnings(), entered as names:
        warnings.filterwarnings("ignore", message=".*XLA pads it")
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        names["step"] = jitted(case, names)
        completion = eval(f"step.complete({call_text(case)})", names)
        compiled = eval(f"step.lower({call_text(case)})", names).compile(options)
    ledger = completion.communication().lowered(PLATFORMS[compiler])
    return Prediction(
        predicted={str(kind): total for kind, total in ledger.by_kind().items()},
        compiled={str(kind): total for kind, total in cost.read_compiled(compiled).by_kind().items()},
        values=len(completion.assignment.specs),
        conflicts=len(completion.conflicts),
    )
