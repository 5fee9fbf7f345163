"""The folder's `README.md`: a row per feature, written anew by `python -m tests.drop_in`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .comparison import TOPICS, Feature

FILE = Path(__file__).parent / "README.md"
HEAD = """# `sharding.jit` in place of `jax.jit`

Each row is a small program that the tests run twice, on the oldest and newest supported JAX: under `jax.jit` on one
device, and under `sharding.jit` sharded over a mesh of eight. It *works* if both give the same values, dtypes,
structures and kinds of errors. *Refused* is a `ShardingError` before anything compiles; the row says what it asks for.
`python -m tests.drop_in` writes this table from the programs in `tests/drop_in/`.
"""


def text(verdicts: Mapping[Feature, str]) -> str:
    """The file."""
    lines = [HEAD.rstrip()]
    for topic, heading in TOPICS.items():
        lines += ["", f"## {heading}", "", "| feature | |", "|---|---|"]
        rows = [(one, found) for one, found in verdicts.items() if one.topic == topic]
        lines += [f"| {row(one)} | {found.replace('|', '&#124;')} |" for one, found in rows]
    return "\n".join(lines) + "\n"


def row(feature: Feature) -> str:
    """The cell that names a feature."""
    return feature.text.replace("|", "&#124;")


def written() -> dict[str, str]:
    """The cell of each feature -> what the file says of it."""
    lines = [line for line in FILE.read_text().splitlines() if line.startswith("| ") and "| feature |" not in line]
    cells = [line.strip("| ").rsplit(" | ", 1) for line in lines]
    return dict(cells)
