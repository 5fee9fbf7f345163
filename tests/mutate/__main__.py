"""`python -m tests.mutate`: puts random faults into a copy of the library and counts those that the tests catch.

    python -m tests.mutate --sample 40 --seed 0                # the tests of the changed file, then of its room
    python -m tests.mutate --sample 40 --level all             # survivors go through all quick tests, minutes each
    python -m tests.mutate --only sharding/propagation         # of one room

A mutant that changes nothing anyone can see is *equivalent*; a reader has to tell those among the survivors, which are
printed with their change. A test that runs three times as long as without the fault counts as caught.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .mutants import Mutant, sample

ROOT = Path(__file__).parents[2]
LEVELS = ("file", "room", "all")


class Copy:
    """A copy of the repository in which one file at a time is changed."""

    def __init__(self, root: Path):
        self.root = root
        for name in ("sharding", "models", "launch", "tests", "notebooks", ".ci"):
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "Makefile"):
            shutil.copy(ROOT / name, root / name)
        for name in ("models", "launch"):  # as installed; an editable installation would find the originals
            (root / "sharding" / name).symlink_to(root / name)
        self.baseline: dict[tuple[str, ...], float] = {}

    def catches(self, mutant: Mutant, paths: tuple[str, ...]) -> bool:
        """Whether tests fail, or hang, with a mutant."""
        if paths not in self.baseline:
            begun = time.monotonic()
            if self._fails(paths, timeout=None):
                raise SystemExit(f"{' '.join(paths)} fails without any fault")
            self.baseline[paths] = time.monotonic() - begun
        file = self.root / mutant.path
        before = file.read_text()
        file.write_text(mutant.source)
        try:
            return self._fails(paths, timeout=60 + 3 * self.baseline[paths])
        finally:
            file.write_text(before)

    def _fails(self, paths: tuple[str, ...], timeout: float | None) -> bool:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *paths]
        env = {**os.environ, "PYTHONPATH": str(self.root), "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(command, cwd=self.root, env=env, capture_output=True, timeout=timeout, check=False)
        except subprocess.TimeoutExpired:
            return True
        return done.returncode not in (0, 5)  # 5: no test was selected


def tests_of(root: Path, path: str, level: str) -> tuple[str, ...]:
    """The tests of a changed file at a level; `tests/` mirrors the tree."""
    place = Path(path).relative_to("sharding") if path.startswith("sharding/") else Path(path)
    mirrored = root / "tests" / place.parent / f"test_{place.name}"
    if level == "file":
        return (mirrored.relative_to(root).as_posix(),) if mirrored.exists() else ()
    room = root / "tests" / place.parts[0]
    if level == "room":
        return (room.relative_to(root).as_posix(),) if room.is_dir() else ()
    return ("tests",)


def _caught_by(copy: Copy, mutant: Mutant, levels: tuple[str, ...]) -> str:
    """The first level whose tests catch a mutant; empty if none does."""
    for level in levels:
        paths = tests_of(copy.root, mutant.path, level)
        if paths and copy.catches(mutant, paths):
            return level
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutate")
    parser.add_argument("--sample", type=int, default=20, help="number of mutants")
    parser.add_argument("--seed", type=int, default=0, help="seed of the choice")
    parser.add_argument("--only", nargs="*", default=[], help="start of the paths to change")
    parser.add_argument("--level", choices=LEVELS, default="room", help="tests that a mutant may go through")
    parser.add_argument("--json", type=Path, default=None, help="file for the results")
    args = parser.parse_args()
    mutants = sample(ROOT, args.sample, seed=args.seed, prefixes=tuple(args.only))
    levels = LEVELS[: 1 + LEVELS.index(args.level)]
    caught: collections.Counter[str] = collections.Counter()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder) / "copy")
        for k, mutant in enumerate(mutants, 1):
            by = _caught_by(copy, mutant, levels)
            caught[mutant.room] += bool(by)
            results.append({"path": mutant.path, "line": mutant.line, "change": mutant.change, "caught_by": by})
            print(
                f"{k}/{len(mutants)} {mutant.path}:{mutant.line}",
                f"caught by its {by}" if by else "SURVIVED",
                flush=True,
            )
            if not by:
                print(mutant.change, flush=True)
    total = collections.Counter(mutant.room for mutant in mutants)
    for room in sorted(total):
        print(f"{room:32} {caught[room]:3} of {total[room]}")
    share = 100 * caught.total() / max(1, len(mutants))
    print(f"{'all':32} {caught.total():3} of {len(mutants)} caught ({share:.0f} %)")
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
