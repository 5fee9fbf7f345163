"""Random programs on random meshes compared with one device.

The statistics of all runs are in one result file.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # as under pytest: `benchmarks` is top-level

from benchmarks.result_file import Result, load

SUMMED = ("programs", "values", "conflicts", "with_gradients", "by_float64", "failures")
COUNTED = ("ops", "meshes", "rejected_by_jax")
NUM_DEVICES = 8


def add(path: Path, run: Mapping[str, Any]) -> None:
    """Adds a run to a file, created if absent; replaces a run of the same programs on the same JAX version.

    Args:
        path: JSON file.
        run: `seed`, `first` and `jax`, and the counts.
    """
    kept = load(path).rows if path.exists() else []
    which = [run[key] for key in ("seed", "first", "jax")]
    runs = [r for r in kept if [r[key] for key in ("seed", "first", "jax")] != which]
    save(path, sorted([*runs, dict(run)], key=lambda r: (r["seed"], r["first"], r["jax"])))


def save(path: Path, runs: list[dict[str, Any]]) -> None:
    """Writes the result file of runs, which may be of several machines and JAX versions."""
    ends = {
        seed: max(r["first"] + r["programs"] for r in runs if r["seed"] == seed) for seed in (r["seed"] for r in runs)
    }
    Result(
        benchmark="fuzz",
        command="; ".join(f"python -m tests.fuzz --seed {seed} --budget {end}" for seed, end in ends.items()),
        jax=" and ".join(sorted({run["jax"] for run in runs})),
        python=None,
        platform=runs[0].get("compiler", "cpu"),
        device=None,
        num_devices=NUM_DEVICES,
        num_processes=1,
        cores=None,
        rows=runs,
    ).save(path)


def totals(result: Result) -> dict[str, Any]:
    """The sums of all runs."""
    counted = {key: sum((Counter(run[key]) for run in result.rows), Counter()) for key in COUNTED}
    return {
        **{key: sum(run.get(key, 0) for run in result.rows) for key in SUMMED},
        **{key: dict(sorted(counts.items())) for key, counts in counted.items()},
    }


def summary(result: Result) -> str:
    """How many programs gave other numbers than one device."""
    found = totals(result)
    return (
        f"{found['programs']:,} programs, {found['with_gradients']:,} with gradients, {len(found['ops'])} kinds of "
        f"ops, {len(found['meshes'])} meshes: {found['failures']} differ from one device"
    )


def revision() -> str:
    """Short hash of the checked-out commit; empty outside a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip()
