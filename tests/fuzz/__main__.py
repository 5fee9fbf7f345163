"""`python -m tests.fuzz`: runs many random programs and compares each with one device, or with its prediction.

    python -m tests.fuzz --seed 0 --budget 10000
    python -m tests.fuzz --minutes 5
    python -m tests.fuzz --predictions --compiler h100 --keep-going   # the collectives predicted and compiled
    python -m tests.fuzz --replay failure.json

A failing program is minimised, printed as a standalone Python file, and written next to its JSON; the exit code is then
1. `--results FILE` stores statistics; those of releases are in `tests/benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import jax

from ..support import quick_compile


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--seed", default="0", help="seed of the programs; reproducible on any machine")
    parser.add_argument("--first", type=int, default=0, help="index of the first program")
    parser.add_argument("--budget", type=int, default=None, help="number of programs")
    parser.add_argument("--minutes", type=float, default=None, help="time limit in minutes")
    parser.add_argument("--replay", type=Path, default=None, help="JSON file of a failing program to run again")
    parser.add_argument("--predictions", action="store_true", help="compare predicted with compiled collectives")
    parser.add_argument("--compiler", choices=["cpu", "v5p", "h100"], default="cpu", help="of --predictions")
    parser.add_argument("--keep-going", action="store_true", help="list failures and continue, without minimising them")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for failing programs")
    parser.add_argument("--results", type=Path, default=None, help="JSON file to add the statistics to")
    args = parser.parse_args()
    quick_compile.set_flags()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)

    from .run import replay, run  # imported late: it initialises the JAX backend, which reads the flags

    if args.replay is not None:
        return replay(args)
    return run(args)


if __name__ == "__main__":
    sys.exit(main())
