"""Bytes moved where XLA's partitioner, left alone, gathers whole arrays ("involuntary full rematerialization").

    python -m tests.benchmarks.rematerialization                                       # half a minute
    python -m tests.benchmarks.rematerialization --table tests/benchmarks/results/rematerialization.md

Each program of `tests/rematerialized.py` is compiled twice for eight virtual CPU devices: left to the partitioner
(`engine="xla"`: the user's constraints alone, as in plain `jax.jit`) and with decided reshards. The bytes are those of
all collectives in the compiled programs; they depend on the release of JAX, not on the machine.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import tyro

from sharding.spec import sizes_text

sys.path.insert(0, str(Path(__file__).parent.parent))  # as pytest has it

from rematerialized import PROGRAMS, Moved, moved


@dataclass(frozen=True)
class Options:
    """What to write."""

    table: Path | None = None
    """Where to write the figures as a Markdown table."""


@dataclass(frozen=True)
class Row:
    """One program both ways."""

    name: str
    mesh: str
    left: Moved
    decided: Moved

    @property
    def ratio(self) -> float:
        """Decided over left alone."""
        return self.decided.bytes / self.left.bytes


def table(rows: Sequence[Row]) -> str:
    """All figures as a Markdown table."""
    head = [
        "# Full rematerializations",
        "",
        f"JAX {jax.__version__}, eight virtual CPU devices; bytes of all collectives of one device. "
        "`python -m tests.benchmarks.rematerialization` writes this.",
        "",
        f"- left alone: XLA warns in {sum(r.left.warned for r in rows)} of {len(rows)} programs",
        f"- decided: XLA warns in {sum(r.decided.warned for r in rows)}; the ratio of bytes is "
        f"{min(r.ratio for r in rows):.2f} to {max(r.ratio for r in rows):.2f}",
        "",
        "| program | mesh | left alone | decided | ratio | warns, left alone | warns, decided |",
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
    """Print the table, and write it where asked."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    rows = []
    for name, program in PROGRAMS.items():
        mesh = sizes_text(program.sizes)
        rows.append(Row(name, mesh, moved(program, "xla"), moved(program, "sharding")))
    text = table(rows)
    print(text)
    if options.table is not None:
        options.table.write_text(text)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
