"""Bytes communicated in programs for which XLA's partitioner does an "involuntary full rematerialization".

    python -m tests.benchmarks.rematerialization                                       # half a minute
    python -m tests.benchmarks.rematerialization --table tests/benchmarks/results/rematerialization.md

Each program of `tests/support/involuntary_remat.py` is compiled twice for eight virtual CPU devices: by XLA's
partitioner (`engine="xla"`: only the user's constraints, as in plain `jax.jit`) and with our reshards. The bytes are
those of all collectives in the compiled programs; they depend on the release of JAX, not on the machine.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import tyro

from sharding.spec import sizes_text

sys.path.insert(0, str(Path(__file__).parent.parent))  # as under pytest: `support` is top-level

from support.involuntary_remat import PROGRAMS, CompiledProgram, compile_program


@dataclass(frozen=True)
class Options:
    """The output file."""

    table: Path | None = None
    """Output file of a Markdown table."""


@dataclass(frozen=True)
class Row:
    """One program, compiled both ways."""

    name: str
    mesh: str
    left: CompiledProgram
    decided: CompiledProgram

    @property
    def ratio(self) -> float:
        """Bytes with our reshards over bytes with XLA's."""
        return self.decided.bytes / self.left.bytes


def table(rows: Sequence[Row]) -> str:
    """All figures as a Markdown table."""
    head = [
        "# Full rematerializations",
        "",
        f"JAX {jax.__version__}, eight virtual CPU devices; bytes of all collectives of one device. "
        "`python -m tests.benchmarks.rematerialization` writes this.",
        "",
        f"- XLA's partitioner: XLA warns in {sum(r.left.warned for r in rows)} of {len(rows)} programs",
        f"- our reshards: XLA warns in {sum(r.decided.warned for r in rows)}; the ratio of bytes is "
        f"{min(r.ratio for r in rows):.2f} to {max(r.ratio for r in rows):.2f}",
        "",
        "| program | mesh | XLA's partitioner | our reshards | ratio | warns, XLA | warns, ours |",
        "|---|---|---|---|---|---|---|",
    ]
    words = {True: "yes", False: "no"}
    body = [
        f"| {r.name} | {r.mesh} | {r.left.bytes:,} | {r.decided.bytes:,} | {r.ratio:.2f} | "
        f"{words[r.left.warned]} | {words[r.decided.warned]} |"
        for r in rows
    ]
    return "\n".join([*head, *body]) + "\n"


def main(options: Options) -> None:
    """Measures, prints the table and writes the output file."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    rows = []
    for name, program in PROGRAMS.items():
        mesh = sizes_text(program.sizes)
        rows.append(Row(name, mesh, compile_program(program, "xla"), compile_program(program, "sharding")))
    text = table(rows)
    print(text)
    if options.table is not None:
        options.table.write_text(text)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
