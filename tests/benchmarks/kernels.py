"""The kernels of `sharding.kernels` against other implementations of the same operation, on one device.

    python -m tests.benchmarks.kernels                       # a few minutes on a GPU or TPU
    python -m tests.benchmarks.kernels --json kernels.json

Each implementation that can run is compiled alone, forward and with gradients, and all take turns. A turn is some calls
without a pause, so that the device never waits for Python. Reported is the time of `implementation="auto"` over that of
the fastest one, by median and quartiles of the turns: 1, if `auto` takes the fastest; and what matrix products reach.
`jax.nn` and, where it is installed, `tokamax` are peers. On a CPU the sizes are tiny and the kernels are interpreted: a
smoke test, whose times mean nothing.
"""

from __future__ import annotations

import functools
import statistics
import time
import warnings
from collections.abc import Callable, Container
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import sharding
from sharding.errors import ShardingError

from . import command_line
from .kernel_cases import AUTO, CASES, Case, normal
from .ratios import Ratio, rounded
from .result_file import Row, measured

CALLS = 10
"""Of a turn on an accelerator."""

SQUARE = 8192
"""Rows and columns of the matrices whose product shows what the device reaches."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    only: tuple[str, ...] = ()
    """Names of operations; by default all."""
    turns: int = 20
    """Timed runs of each implementation."""
    json: Path | None = None
    """Output file of the figures."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A compiled implementation."""

    implementation: str
    run: Callable[[], Any]

    def seconds(self, calls: int) -> float:
        """Of a call, among some without a pause."""
        begun = time.perf_counter()
        jax.block_until_ready([self.run() for _ in range(calls)])
        return (time.perf_counter() - begun) / calls


def main(options: Options) -> None:
    """Measures and prints a table."""
    is_smoke = jax.default_backend() == "cpu"
    print(jax.devices()[0].device_kind + is_smoke * " (smoke test: interpreted kernels, whose times mean nothing)")
    rows: list[Row] = []
    if not is_smoke:
        rows += matmul(options.turns)
    for case in CASES:
        if not options.only or case.name in options.only:
            for has_gradients in case.directions:
                rows += measure(case, has_gradients, is_smoke, options.turns)
    if options.json is not None:
        measured("kernels", options, rows, num_devices=1).save(options.json)


def measure(case: Case, has_gradients: bool, is_smoke: bool, turns: int) -> list[Row]:
    """The rows of an operation's implementations, which are printed too."""
    args = arguments(case, has_gradients, is_smoke)
    return timed(case, has_gradients, compiled(case, args, has_gradients), args, is_smoke, turns)


def arguments(case: Case, has_gradients: bool, is_tiny: bool) -> tuple[Any, ...]:
    """Of an operation, after cotangents of its results if it is differentiated.

    Cotangents are random arrays in memory, as a backward pass gets them.
    """
    args = case.args(is_tiny)
    if not has_gradients:
        return args
    results = jax.eval_shape(case.implementations()["xla"], *args)
    return jax.tree.map(lambda y: normal(9, y.shape, y.dtype), results), *args


def timed(
    case: Case, has_gradients: bool, programs: list[Program], args: tuple[Any, ...], is_smoke: bool, turns: int
) -> list[Row]:
    """The rows of programs, which are printed too."""
    seconds: dict[str, list[float]] = {one.implementation: [] for one in programs}
    for _ in range(3 if is_smoke else turns):
        for one in programs:
            seconds[one.implementation].append(one.seconds(1 if is_smoke else CALLS))
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    best = min((name for name in medians if name != AUTO), key=lambda name: medians[name])
    flops = case.flops(args[has_gradients:]) * (3.5 if has_gradients else 1)
    rows = []
    for name, median in medians.items():
        row: Row = {"kind": "kernel", "name": f"{label(case, has_gradients)}: {name}"}
        ratio = Ratio.of_pairs(seconds[name], seconds[best])
        if is_smoke:
            row["kind"] = "smoke test"
        else:
            row["microseconds"] = rounded(1e6 * median)
            row["tflops_per_second"] = rounded(flops / median / 1e12) if flops else None
            row |= {"best": best} | ratio.as_row() if name == AUTO else {}
        rows.append(row)
        compared = f"  {ratio} of {best}" * (name == AUTO and not is_smoke)
        print(f"{row['name']:60} {1e6 * median:12,.1f} us{compared}", flush=True)
    return rows


def label(case: Case, has_gradients: bool) -> str:
    """The operation in names of rows."""
    return f"{case.name}{', gradients' * has_gradients}"


def matmul(turns: int) -> list[Row]:
    """What a product of square matrices in bfloat16 reaches."""
    x, w = normal(0, (SQUARE, SQUARE)), normal(1, (SQUARE, SQUARE))
    program = Program(implementation="xla", run=functools.partial(jax.jit(jnp.dot).lower(x, w).compile(), x, w))
    median = statistics.median([program.seconds(CALLS) for _ in range(turns + 2)][2:])
    name = f"bfloat16 matmul, {SQUARE:,}"
    row: Row = {"kind": "matmul", "name": name, "microseconds": rounded(1e6 * median)}
    row["tflops_per_second"] = rounded(2 * SQUARE**3 / median / 1e12)
    print(f"{name:60} {row['tflops_per_second']:12,.1f} TFLOP/s", flush=True)
    return [row]


def compiled(
    case: Case, args: tuple[Any, ...], has_gradients: bool, only: Container[str] | None = None
) -> list[Program]:
    """The implementations that can run here, compiled side by side."""

    def program(item: tuple[str, Callable[..., Any]]) -> Program | None:
        name, f = item
        step = with_gradients(f, case.wrt) if has_gradients else f
        try:
            with sharding.mesh(data=1, devices=jax.devices()[:1]):
                run = functools.partial(sharding.jit(step).lower(*args).compile(), *args)
        except ShardingError as error:
            print(f"{case.name}: {name} left out: {' '.join(str(error).split())}")
            return None
        jax.block_until_ready(run())
        return Program(implementation=name, run=run)

    items = [(name, f) for name, f in case.implementations().items() if only is None or name in only]
    with warnings.catch_warnings(), ThreadPoolExecutor() as pool:
        warnings.simplefilter("ignore")  # that `auto` takes plain JAX
        return [one for one in pool.map(program, items) if one is not None]


def with_gradients(f: Callable[..., Any], wrt: tuple[int, ...]) -> Callable[..., Any]:
    """(cotangents of the results, *args) -> the gradients of some arguments."""

    def gradients(cotangents: Any, *args: Any) -> Any:
        def of_some(*some: Any) -> Any:
            at = dict(zip(wrt, some, strict=True))
            return f(*(at.get(n, x) for n, x in enumerate(args)))

        results, pull_back = jax.vjp(of_some, *(args[n] for n in wrt))
        return pull_back(jax.tree.map(lambda ct, y: ct.astype(y.dtype), cotangents, results))

    return gradients


if __name__ == "__main__":
    command_line.run(main, Options, __doc__)
