"""Statistics of fuzzing runs in one JSON file: each run, and totals."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SUMMED = ("programs", "values", "conflicts", "with_gradients", "by_float64", "failures")
COUNTED = ("ops", "meshes", "rejected_by_jax")


def add(path: Path, run: Mapping[str, Any]) -> None:
    """Adds a run to a file, created if absent; replaces a run of the same programs on the same JAX version.

    Args:
        path: JSON file.
        run: `seed`, `first` and `jax`, and the counts.
    """
    kept = json.loads(path.read_text()) if path.exists() else {"runs": []}
    which = [run[key] for key in ("seed", "first", "jax")]
    runs = [r for r in kept["runs"] if [r[key] for key in ("seed", "first", "jax")] != which]
    runs = sorted([*runs, dict(run)], key=lambda r: (r["seed"], r["first"], r["jax"]))
    total = {key: sum(r.get(key, 0) for r in runs) for key in SUMMED}
    counted = {key: dict(sorted(sum((Counter(r[key]) for r in runs), Counter()).items())) for key in COUNTED}
    path.write_text(json.dumps({**total, **counted, "runs": runs}, indent=1) + "\n")


def revision() -> str:
    """Short hash of the checked-out commit; empty outside a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip()
