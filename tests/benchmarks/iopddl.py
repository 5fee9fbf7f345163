"""The planner on problems of the ASPLOS 2025 contest on intra-operator parallelism, within the contest's time limits.

    python -m tests.benchmarks.iopddl A.json.gz K.json.gz              # files: github.com/google/iopddl
    python -m tests.benchmarks.iopddl K.json.gz --best K 2242635780    # with the best known cost
    python -m tests.benchmarks.iopddl A.json.gz --algorithm alpa --json iopddl.json

A file's name tells its limit: A to E 60 seconds, F to J 120, K to O 180, P to T 240, U to Y 300; others take
`--seconds`. Time includes reductions, but not reading the file. `gap` is how far the cost is above the lower
bound, as a part of the bound; `ratio` is the cost over the best known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tyro.conf import Positional

from sharding import ShardingError, planner
from sharding.display import Column, Table

from . import command_line, result_file
from .result_file import Result, Row

LIMITS = {"ABCDE": 60.0, "FGHIJ": 120.0, "KLMNO": 180.0, "PQRST": 240.0, "UVWXY": 300.0}
"""Seconds of the contest's problems, by the letters in their files' names."""
COLUMNS = {
    "name": Column("file"),
    "cost": Column("cost", "number"),
    "bound": Column("bound", "number"),
    "gap": Column("gap", "share"),
    "best_known": Column("best known", "number"),
    "ratio": Column("ratio", "number"),
    "peak_bytes": Column("peak", "bytes"),
    "limit_bytes": Column("limit", "bytes"),
    "seconds": Column("time", "seconds"),
}


@dataclass(frozen=True)
class Options:
    """The files, the algorithm, and what to compare with."""

    files: Positional[tuple[str, ...]]
    """`.json` or `.json.gz`."""
    algorithm: str = "auto"
    """A key of `planner.ALGORITHMS`."""
    seconds: float = 60.0
    """Limit of files that are not the contest's."""
    seed: int = 0
    best: Mapping[str, float] = field(default_factory=dict)
    """Best known costs, by file name without its suffixes."""
    json: Path | None = None
    """Output file of the figures."""


def name_of(path: Path) -> str:
    """A file's name without its suffixes."""
    return path.name.partition(".")[0]


def limit_seconds(name: str, default: float) -> float:
    """The contest's limit of a problem."""
    return next((seconds for letters, seconds in LIMITS.items() if len(name) == 1 and name in letters), default)


def row(path: Path, options: Options) -> Row:
    """The figures of one file; without a cost if nothing was found."""
    name, problem = name_of(path), planner.read(path)
    figures: Row = {"kind": "problem", "name": name, "limit_bytes": problem.memory_bytes, "nodes": problem.num_nodes}
    seconds = limit_seconds(name, options.seconds)
    try:
        solution = planner.solve(problem, options.algorithm, seconds=seconds, seed=options.seed)
    except ShardingError as error:
        return {**figures, "error": str(error)}
    best = options.best.get(name)
    return {
        **figures,
        "cost": solution.cost,
        "bound": solution.bound,
        "gap": solution.gap,
        "peak_bytes": solution.peak_bytes,
        "seconds": solution.seconds,
        "best_known": best,
        "ratio": None if best is None else solution.cost / best,
    }


def printed(rows: list[Row]) -> Table:
    """The rows as a table; best known costs only if some are given."""
    shown = [key for key in COLUMNS if any(each.get(key) is not None for each in rows)]
    return Table("", tuple(COLUMNS[key] for key in shown), [tuple(each.get(key) for key in shown) for each in rows])


def main(options: Options) -> None:
    """Solves the files one after another, prints a table and writes it."""
    rows = []
    for file in options.files:
        rows.append(row(Path(file), options))
        print(rows[-1]["name"], rows[-1].get("cost", rows[-1].get("error")), flush=True)
    result = result_file.measured("iopddl", options, rows, num_devices=1)
    print(printed(rows), result.where, sep="\n")
    if options.json is not None:
        result.save(options.json)


def summary(result: Result) -> str:
    """Each file's cost, and how that compares with the best known one."""
    found = []
    for row in result.rows:
        if "error" in row:
            found.append(f"{row['name']} no choice found")
            continue
        facts = ["proven"] if row["gap"] == 0 else []
        facts += [f"{row['ratio']:.4f} of the best known"] if row.get("ratio") is not None else []
        found.append(f"{row['name']} {row['cost']:,.0f} in {row['seconds']:.0f} s ({', '.join(facts)})")
    return "; ".join(found)


if __name__ == "__main__":
    command_line.run(main, Options, __doc__)
