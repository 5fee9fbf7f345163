"""Bytes sent and step times of train steps with our reshards, over those with the reshards of XLA's partitioner.

    python -m tests.benchmarks.reshards                                # an idle machine: some 20 minutes
    python -m tests.benchmarks.reshards --steps gpt lstm --meshes 0 3  # some of them
    python -m tests.benchmarks.reshards --repeats 0                    # bytes alone, on any machine
    python -m tests.benchmarks.reshards --repeats 0 --compiler v5p     # or h100: ahead of time, no chip is needed
    python tests/benchmarks/reshards.py --repeats 0 --corpus --compiler h100  # other people's programs: hours

The programs, meshes and annotations of `prediction`, compiled with all constraints and with `engine="xla"`, where the
partitioner reshards. Both get the same annotations. The bytes are those that a device sends in all collectives
(`cost.wire_bytes`); the times are of alternating runs on eight virtual CPU devices.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import sharding
from sharding import cost
from sharding.mesh import tracing_context
from sharding.spec import sizes_text

sys.path.insert(0, str(Path(__file__).parent.parent))  # as under pytest: `support` and `corpus` are top-level

from benchmarks import command_line, prediction
from benchmarks.ratios import Ratio
from benchmarks.result_file import Result, Row


@dataclass(frozen=True)
class Options:
    """The programs and the number of runs."""

    compiler: prediction.CompilerName = "cpu"
    """XLA:CPU, or a compiler ahead of time (extras `tpu` and `cuda13`), whose programs can't be timed."""
    corpus: bool = False
    """Other people's programs (extra `corpus`) in place of the project's own steps."""
    steps: tuple[str, ...] = ()
    """Programs by name, or by the start of their names. Default: all."""
    meshes: tuple[int, ...] = ()
    """Indices of the meshes. Default: all."""
    styles: tuple[str, ...] = prediction.STYLES
    """Annotations: the batch alone, or the weights too."""
    repeats: int = 7
    """Timed runs of each."""
    json: Path | None = None
    """Output file of the figures."""

    def cases(self) -> list[prediction.Case]:
        """The chosen programs, each on the chosen meshes."""
        chosen = prediction.Options(corpus=self.corpus, steps=self.steps, meshes=self.meshes, styles=self.styles)
        return list(prediction.cases(chosen))


def compared(case: prediction.Case, compiler: prediction.CompilerName, repeats: int) -> Row:
    """The row of a program; the ratio of its times is null if they are not measured."""
    sizes = dict(case.mesh)
    with sharding.mesh(sizes, devices=prediction.devices_of(sizes, compiler)):
        with tracing_context():
            step = case.make()
        jitted = partial(sharding.jit, step.run, in_shardings=step.specs, donate_argnums=0)
        ours, left = (jitted(engine=engine).lower(*step.args).compile() for engine in ("sharding", "xla"))
        sent, left_sent = (cost.read_compiled(compiled).sent_bytes for compiled in (ours, left))
        time_ratio = ratio(ours, left, step.args, repeats).as_row() if repeats else None
    jax.clear_caches()
    # 1 where neither sends any.
    found = {"sent_bytes": sent, "left_bytes": left_sent, "sent_ratio": round((sent + 1) / (left_sent + 1), 4)}
    return {"name": case.name, "mesh": sizes_text(sizes), "style": case.style, **found, "time_ratio": time_ratio}


def ratio(ours: Any, left: Any, args: Sequence[Any], repeats: int) -> Ratio:
    """The ratio of the times of two compiled programs in alternating runs, after a warm-up run."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for k in range(repeats + 1):
        for found, compiled in zip(seconds, (ours, left), strict=True):
            given = jax.block_until_ready(jax.tree.map(zeros, tuple(args), compiled.input_shardings[0]))
            start = time.perf_counter()
            jax.block_until_ready(compiled(*given))
            if k:
                found.append(time.perf_counter() - start)
    return Ratio.of_pairs(*seconds)


def zeros(shape: jax.ShapeDtypeStruct, sharding: Any) -> jax.Array:
    """An array of zeros; PRNG keys all of one seed."""
    if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
        return jax.device_put(jnp.broadcast_to(jax.random.key(0), shape.shape), sharding)
    return jax.device_put(jnp.zeros(shape.shape, shape.dtype), sharding)


def summary(result: Result) -> str:
    """The ratios of bytes, and of times if measured."""
    sent = sorted(row["sent_ratio"] for row in result.rows)
    times = [row["time_ratio"]["median"] for row in result.rows if row["time_ratio"] is not None]
    what = "train and inference steps of other people" if result.options.get("corpus") else "train steps"
    text = (
        f"no more bytes sent in {sum(ratio <= 1 for ratio in sent)} of {len(sent)} {what}, ratio "
        f"{statistics.median(sent):.2f} (best {sent[0]:.2f}, worst {sent[-1]:.2f})"
    )
    return f"{text}; step time {Ratio.of_all(times, [1.0])}, of the programs' medians" if times else text


def table(result: Result) -> list[str]:
    """All figures as a Markdown table."""
    return [
        "| program | mesh | annotated | bytes sent, ratio | step time, ratio |",
        "|---|---|---|---|---|",
        *(
            f"| {row['name']} | {row['mesh']} | {row['style']} | {row['sent_ratio']:.2f} | "
            f"{'-' if row['time_ratio'] is None else Ratio(**row['time_ratio'])} |"
            for row in result.rows
        ),
    ]


def main(options: Options) -> None:
    """Prints a line per program, then the summary."""
    if options.repeats and options.compiler != "cpu":
        raise SystemExit(f"Programs for {options.compiler} are compiled only: --repeats 0")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 64 if options.corpus else 8)
    cases = options.cases()
    result = prediction.result_of("reshards", options, cases)
    rows: list[Row] = []
    for case in cases:
        try:
            row = compared(case, options.compiler, options.repeats)
        except Exception as error:  # of a package or a compiler: the others go on
            print(f"{case.label:60} failed: {prediction.first_line(error)}", flush=True)
            continue
        rows.append(row)
        times = "" if row["time_ratio"] is None else f"time {Ratio(**row['time_ratio'])}"
        print(f"{case.label:60} sent {row['sent_ratio']:5.2f}  {times}", flush=True)
        if options.json is not None:
            result(rows).save(options.json)  # of the programs so far: hours of compiling
    final = result(rows)
    print(summary(final) if rows else "no program", final.where, sep="\n")


if __name__ == "__main__":
    command_line.run(main, Options, __doc__)
