"""Checks a case on its mesh against one device: numbers, types and shapes, and the invariants of the completion.

Integers, bools and exact floats must be bit-identical. Other floats are summed in another order on a mesh, so their
error must be within `TIGHT` of the result's norm, plus `FLOOR` per element for results that cancel out. A program may
amplify rounding beyond that; it then runs in float64 on both sides, where rounding is 2**29 times smaller and a wrong
value is as wrong as before. The limits there are the same over 2**24, or, for results nearly lost to cancellation, the
float32 error over 2**24. Limits are wider only for programs that round inexact values to bfloat16 (`coarse`), whose
half dtype is float64 in the second run, too.
"""

from __future__ import annotations

import contextlib
import io
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, Sharding

import sharding
from sharding import P
from sharding.spec import to_partition_spec

from . import prelude
from .case import (
    Case,
    arguments_text,
    body_text,
    call_text,
    dtypes_text,
    mesh_text,
    options_text,
    placing_alone_text,
    placing_text,
    static_text,
    walk,
)

TIGHT, FLOOR = 1e-5, 1e-6
COARSE = 1e-2
WIDE = 2.0**-24


class Mismatch(AssertionError):
    """Raised when a case shows a bug."""


class Rejected(Exception):
    """Raised when plain JAX on one device rejects the program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Outcome of a case without a bug."""

    arbitrated: bool
    """Whether the comparison needed float64."""
    values: int
    conflicts: int


def check(case: Case, *, options: dict[str, Any] | None = None, twice: bool = True) -> Outcome:
    """Runs a case. Raises Mismatch, or any error of the library.

    Args:
        case: the case to run.
        options: compiler options for both sides.
        twice: whether to complete, and to call, a second time and compare.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*XLA pads it")
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        alone = _alone(case, False, options)
        ours, completion = _on_mesh(case, False, options, twice)
        _check_completion(case, completion)
        _compare_effects(case, ours, alone)
        far = _compare(case, ours.results, alone.results, COARSE if case.coarse else TIGHT, FLOOR)
        if far:
            wide = _in_float64(case, options)
            wrong = {i: miss for i, miss in wide.items() if i not in far or not miss.error <= far[i].error * WIDE}
            if wrong:
                raise Mismatch(f"{_text(far)}; in float64: {_text(wrong)}")
    return Outcome(arbitrated=bool(far), values=len(completion.assignment.specs), conflicts=len(completion.conflicts))


@dataclass(frozen=True, slots=True)
class _Miss:
    """Error and norm of a result."""

    error: float
    norm: float


def _text(misses: dict[int, _Miss]) -> str:
    return "; ".join(f"result {i} is off by {miss.error:.3g} of {miss.norm:.3g}" for i, miss in misses.items())


def _in_float64(case: Case, options: dict[str, Any] | None) -> dict[int, _Miss]:
    was = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)  # a context is of this thread alone, and callbacks run in others
    try:
        alone = _alone(case, True, options)
        ours, _ = _on_mesh(case, True, options, False)
        return _compare(case, ours.results, alone.results, TIGHT * WIDE, FLOOR * WIDE)
    except Rejected as e:
        raise Mismatch(f"float64 is not to be had: {e}") from e
    finally:
        jax.config.update("jax_enable_x64", was)


def namespace(case: Case, wide: bool) -> dict[str, Any]:
    """Namespace of the executed program text: `make` and `arguments`."""
    names = {**vars(prelude), "jax": jax, "jnp": jnp, "lax": lax, "np": np, "sharding": sharding, "P": P}
    names |= {"NamedSharding": NamedSharding}
    for text in (dtypes_text(wide), body_text(case), arguments_text(case)):
        exec(compile(text, "case.py", "exec"), names)
    return names


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a program returned, left in its refs, and called back."""

    results: list[np.ndarray]
    """The results, and the final contents of refs that were passed."""
    kinds: list[str]
    """Kind of memory of each result."""
    effects: dict[str, list[Any]]
    """What callbacks got, and what was printed."""


def _run(call: Callable[[], Any], args: list[Any], case: Case) -> Run:
    prelude.NOTED.clear()
    prelude.NOTED_IN_ORDER.clear()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        out = list(jax.block_until_ready(call()))
        jax.effects_barrier()
    effects = {
        "callbacks": sorted(prelude.NOTED),
        "ordered callbacks": list(prelude.NOTED_IN_ORDER),
        "printed lines": sorted(printed.getvalue().splitlines()),
    }
    kinds = [x.sharding.memory_kind for x in out]
    written = [x[...] for x, a in zip(args, case.arguments, strict=True) if a.type.place == "ref"]
    return Run(results=list(map(_numpy, [*out, *written])), kinds=kinds, effects=effects)


def _alone(case: Case, wide: bool, options: dict[str, Any] | None) -> Run:
    names = namespace(case, wide)
    names["args"] = args = names["arguments"]()
    for line in placing_alone_text(case):
        exec(line, names)
    static = eval(f"dict({static_text(case)})", names)
    names["step"] = jax.jit(names["make"](prelude.plain, jax.jit), compiler_options=options, **static)
    try:
        eval(f"step.lower({call_text(case)})", names)
    except Exception as e:
        raise Rejected(f"{type(e).__name__}: {e}") from e

    def call() -> Any:
        return eval(f"step({call_text(case)})", names)

    try:
        return _run(call, args, case)
    except jax.errors.JaxRuntimeError:  # XLA fails to compile the full program on one device: run it op by op
        with jax.disable_jit():
            return _run(call, args, case)


def _on_mesh(case: Case, wide: bool, options: dict[str, Any] | None, twice: bool) -> tuple[Run, sharding.Completion]:
    with on_mesh(case, wide) as names:
        step = jitted(case, names, options)
        complete = f"step.complete({call_text(case)})"
        completion = eval(complete, names | {"step": step})
        if twice:
            again = eval(complete, names | {"step": jitted(case, names, options)})
            if _decided(completion) != _decided(again):
                raise Mismatch("a second completion differs from the first")
        out: list[Any] = []

        def call() -> list[Any]:
            out[:] = eval(f"step({call_text(case)})", names | {"step": step})
            return out

        found = _run(call, names["args"], case)
        if twice and not any(a.donated or a.type.place == "ref" for a in case.arguments):
            again = eval(f"step({call_text(case)})", names | {"step": step})
            for i, (x, y) in enumerate(zip(found.results, map(_numpy, again), strict=True)):
                if x.dtype.kind != "V" and not np.array_equal(x, y, equal_nan=x.dtype.kind in "fc"):
                    raise Mismatch(f"result {i} of a second call differs from the first")
        _check_out_shardings(case, completion, out, names["mesh"])
    return found, completion


def _check_out_shardings(case: Case, completion: sharding.Completion, out: list[Any], mesh: Mesh) -> None:
    for i, (x, spec) in enumerate(zip(out, completion.out_shardings, strict=True)):
        spec = spec.spec if isinstance(spec, NamedSharding) else spec
        if not x.sharding.is_equivalent_to(on := NamedSharding(mesh, spec), x.ndim):
            if not is_equal_up_to_kind(x.sharding, on, x.ndim):
                raise Mismatch(f"result {i} comes back as {x.sharding}, completed was {spec}")
        if case.explicit and not (isinstance(x.sharding, NamedSharding) and x.sharding.mesh == mesh):
            raise Mismatch(f"result {i} comes back on {x.sharding}, the mesh is {mesh}")


def is_equal_up_to_kind(a: Sharding, b: Sharding, ndim: int) -> bool:
    return a.with_memory_kind("device").is_equivalent_to(b.with_memory_kind("device"), ndim)


@contextlib.contextmanager
def on_mesh(case: Case, wide: bool = False) -> Iterator[dict[str, Any]]:
    """Enters the mesh of a case; yields the namespace of its text with `mesh` and the placed arguments, `args`."""
    names = namespace(case, wide)
    with eval(mesh_text(case), names):
        names["mesh"] = jax.sharding.get_mesh()
        names["args"] = names["arguments"]()
        for line in placing_text(case):
            exec(line, names)
        yield names


def jitted(case: Case, names: dict[str, Any], options: dict[str, Any] | None = None) -> Any:
    """The program of a case under `sharding.jit`."""
    asked = eval(f"dict({options_text(case)})", names)
    program = names["make"](sharding.annotate, sharding.jit, prelude.put_on(names["mesh"]))
    return sharding.jit(program, compiler_options=options, **asked)


def completed(case: Case) -> sharding.Completion:
    """The completion of a case, without compiling."""
    with warnings.catch_warnings(), on_mesh(case) as names:
        warnings.filterwarnings("ignore", message=".*XLA pads it")
        return eval(f"step.complete({call_text(case)})", names | {"step": jitted(case, names)})


def _decided(c: sharding.Completion) -> Any:
    reasons = [(k, r.word, r.source, r.value, r.dim) for k, r in c.assignment.reasons.items()]
    return c.assignment.specs, reasons, tuple(map(str, c.conflicts))


def _numpy(x: Any) -> np.ndarray:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)


def _compare_effects(case: Case, ours: Run, alone: Run) -> None:
    for i, (a, b) in enumerate(zip(ours.kinds, alone.kinds, strict=True)):
        asked = case.out_kinds[i] if i < len(case.out_kinds) else None
        if a != (asked or b):
            raise Mismatch(f"result {i} comes back in {a} memory, not in {asked or b}")
    for what, theirs in alone.effects.items():
        if ours.effects[what] != theirs:
            raise Mismatch(f"{what} differ: {ours.effects[what]} on the mesh, {theirs} on one device")


def _compare(case: Case, ours: list[Any], alone: list[Any], tight: float, floor: float) -> dict[int, _Miss]:
    """Float results with errors beyond the limits; raises for mismatches that a float64 run cannot resolve."""
    if len(ours) != len(alone):
        raise Mismatch(f"{len(ours)} results instead of {len(alone)}")
    far: dict[int, _Miss] = {}
    for i, (a, b) in enumerate(zip(ours, alone, strict=True)):
        if a.dtype != b.dtype or a.shape != b.shape:
            raise Mismatch(f"result {i} is {a.dtype}{list(a.shape)} instead of {b.dtype}{list(b.shape)}")
        if (i < len(case.exact) and case.exact[i]) or a.dtype.kind not in "fcV":
            if not np.array_equal(a, b):
                count = int((a != b).sum())
                raise Mismatch(f"result {i} is exact, {count} of {a.size} elements differ")
            continue
        kind = np.complex128 if a.dtype.kind == "c" else np.float64
        x, y = a.astype(kind), b.astype(kind)
        if not np.isfinite(y).all():
            raise Rejected(f"result {i} is not finite on one device")
        error, norm = np.linalg.norm(x - y), np.linalg.norm(y)
        if not error <= tight * norm + floor * math.sqrt(max(1, a.size)):
            far[i] = _Miss(float(error), float(norm))
    return far


def _check_completion(case: Case, c: sharding.Completion) -> None:
    """Checks that every closed annotation is met, and that why, the table and its HTML can be produced."""
    a = c.assignment
    for v, annotation in a.graph.annotations.items():
        for d, (asked, got) in enumerate(zip(annotation.spec.dims, a.specs[v].dims, strict=True)):
            if (got.axes[: len(asked.axes)] if asked.open else got.axes) != asked.axes:
                raise Mismatch(f"{a.graph.label(v)} dim {d}: asked {asked} by {annotation.origin}, got {got}")
    for spec in a.specs:
        used = [axis for dim in spec.dims for axis in dim.axes]
        if len(set(used)) != len(used):
            raise Mismatch(f"an axis is used twice: {spec}")
    for record in case.records:
        if (
            record.op == "annotate"
            and "name=" in record.text
            and record.spec is not None
            and not a.graph.annotation_conflicts
        ):
            _check_name(case, record, c)
    for name in a.graph.names:
        lines = tuple(c.why(name))
        if not lines:
            raise Mismatch(f"no line of why for {name}")
    str(c), c._repr_html_(), repr(c.conflicts), c.uneven


def _check_name(case: Case, record: Any, c: sharding.Completion) -> None:
    name = record.text.split('name="')[1].split('"')[0]
    if name not in c.assignment.graph.names:
        return  # repeated by a derivative that traces the program again
    got = c.assignment.specs[c.assignment.graph.names[name]]
    sizes = dict(case.mesh)
    entries = (*record.spec, *[None] * (len(got.dims) - len(record.spec)))
    for d, (entry, dim) in enumerate(zip(entries, got.dims, strict=True)):
        asked = entry if isinstance(entry, tuple) else (entry,)
        axes = tuple(a for a in asked if a in sizes and sizes[a] > 1)
        grows = "?" in asked or "..." in asked
        if (dim.axes[: len(axes)] if grows else dim.axes) != axes:
            raise Mismatch(f"{name} dim {d} is asked to be {entry}, got {to_partition_spec(got)}")


def ops_of(case: Case) -> list[str]:
    """Names of the ops of a case."""
    return [record.op for record in walk(case.records)]
