"""`python -m tests.fuzz`: many random programs, each held against one device.

    python -m tests.fuzz --seed 0 --budget 10000
    python -m tests.fuzz --minutes 5
    python -m tests.fuzz --replay failure.json

A failing program is made small, printed as a Python file that runs by itself, and written beside its JSON; the exit
status is then 1. `--results FILE` keeps the counts; those of the releases are in `tests/benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import jax

from .. import quick


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--seed", default="0", help="which programs; the same seed gives the same ones anywhere")
    parser.add_argument("--first", type=int, default=0, help="the number of the first program")
    parser.add_argument("--budget", type=int, default=None, help="how many programs")
    parser.add_argument("--minutes", type=float, default=None, help="how long")
    parser.add_argument("--replay", type=Path, default=None, help="a failing program's JSON")
    parser.add_argument("--keep-going", action="store_true", help="list failures and go on, without making them small")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for failing programs")
    parser.add_argument("--results", type=Path, default=None, help="file to which the counts are added")
    args = parser.parse_args()
    quick.set_flags()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)

    from .run import replay, run  # starts JAX's backend, whose flags are set by now

    if args.replay is not None:
        return replay(args.replay)
    return run(args)


if __name__ == "__main__":
    sys.exit(main())
