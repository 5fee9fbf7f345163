"""Bytes communicated in programs for which XLA's partitioner does an "involuntary full rematerialization".

    python -m tests.benchmarks.rematerialization                              # half a minute
    python -m tests.benchmarks.rematerialization --json rematerialization.json

Each program of `tests/support/involuntary_remat.py` is compiled twice for eight virtual CPU devices: by XLA's
partitioner (`engine="xla"`: only the user's constraints, as in plain `jax.jit`) and with our reshards. The bytes are
those of all collectives in the compiled programs; they depend on the release of JAX, not on the machine.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import jax

from sharding.spec import sizes_text

sys.path.insert(0, str(Path(__file__).parent.parent))  # as under pytest: `support` is top-level

from support.involuntary_remat import PROGRAMS, Program, compile_program

from . import command_line
from .result_file import Result, Row, measured


@dataclass(frozen=True)
class Options:
    """The output file."""

    json: Path | None = None
    """Output file of the figures."""


def measured_row(name: str, program: Program) -> Row:
    """One program, compiled both ways."""
    left, ours = compile_program(program, "xla"), compile_program(program, "sharding")
    found = {"left_bytes": left.bytes, "left_warned": left.warned, "bytes": ours.bytes, "warned": ours.warned}
    return {"name": name, "mesh": sizes_text(program.sizes), **found}


def summary(result: Result) -> str:
    """In how many programs XLA warns, and the ratios of bytes."""
    rows, ratios = result.rows, sorted(row["bytes"] / row["left_bytes"] for row in result.rows)
    return (
        f"XLA warns in {sum(row['warned'] for row in rows)} instead of {sum(row['left_warned'] for row in rows)} of "
        f"{len(rows)} programs; bytes {statistics.median(ratios):.2f} of XLA's, {ratios[0]:.2f} to {ratios[-1]:.2f}"
    )


def table(result: Result) -> list[str]:
    """All figures as a Markdown table."""
    words = {True: "yes", False: "no"}
    return [
        "| program | mesh | bytes, XLA's partitioner | bytes, ours | ratio | warns, XLA's | warns, ours |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {r['name']} | {r['mesh']} | {r['left_bytes']:,} | {r['bytes']:,} | "
            f"{r['bytes'] / r['left_bytes']:.2f} | {words[r['left_warned']]} | {words[r['warned']]} |"
            for r in result.rows
        ),
    ]


def main(options: Options) -> None:
    """Compiles, prints the table and writes the output file."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    rows = [measured_row(name, program) for name, program in PROGRAMS.items()]
    result = measured("rematerialization", options, rows)
    print(*table(result), summary(result), result.where, sep="\n")
    if options.json is not None:
        result.save(options.json)


if __name__ == "__main__":
    command_line.run(main, Options, __doc__)
