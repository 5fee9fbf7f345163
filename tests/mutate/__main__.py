"""`python -m tests.mutate`: puts random faults into a copy of the library and counts those that the tests catch.

    python -m tests.mutate --sample 40 --seed 0                # tests of the changed file, then of its room
    python -m tests.mutate --only sharding/propagation         # of one room
    python -m tests.mutate --tests tests/cost tests/explain    # other tests than those of the rooms
    python -m tests.mutate --lines /tmp/lines                  # keep what each test executes for the next run

The tests run once without a fault, which shows what lines each of them executes (`sys.monitoring`, Python 3.12). A
mutant then goes only through the tests that execute its line, the most specific first. A mutant that changes nothing
anyone can see is *equivalent*; a reader has to tell those among the survivors, which are printed with their change.
Tests that hang count as failed.
"""

from __future__ import annotations

import argparse
import collections
import json
import shutil
import sys
import tempfile
from pathlib import Path

from . import forked_pytest
from .line_coverage import Coverage, InOrder, LineRecorder, covering_tests, read
from .mutants import ROOMS, Mutant, sample

ROOT = Path(__file__).parents[2]


class Copy:
    """A copy of the repository in which one file at a time is changed."""

    def __init__(self, root: Path, lines: Path):
        self.root = root
        self.lines = lines
        """Folder of what each test executes."""
        for name in ("sharding", "models", "launch", "tests", "notebooks", ".ci"):
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "Makefile"):
            shutil.copy(ROOT / name, root / name)
        for name in ("models", "launch"):  # as installed; an editable installation would find the originals
            (root / "sharding" / name).symlink_to(root / name)

    def coverage(self, paths: tuple[str, ...]) -> Coverage:
        """What each test of some paths executes, from a run without a fault."""
        found: Coverage = {}
        for path in paths:
            file = self.lines / f"{path.replace('/', '_')}.json"
            if not file.exists():
                recorder = LineRecorder(self.root, tuple(f"{room}/" for room in ROOMS), file)
                if forked_pytest.run(self.root, [path], plugins=[recorder]) not in (0, 5):  # 5: no test was selected
                    raise SystemExit(f"{path} fails without any fault")
            found |= read(file)
        return found

    def catches(self, mutant: Mutant, tests: tuple[str, ...], seconds: float) -> bool:
        """Whether one of the tests fails with a mutant, or all take longer than some seconds."""
        file = self.root / mutant.path
        before = file.read_text()
        file.write_text(mutant.source)
        files = sorted({name.split("::")[0] for name in tests})
        try:
            return forked_pytest.run(self.root, files, plugins=[InOrder(tests)], seconds=seconds) != 0
        finally:
            file.write_text(before)


def mirrored(root: Path, path: str) -> tuple[str, ...]:
    """The tests of a changed file and of its room, as far as there are any: `tests/` mirrors the tree."""
    place = Path(path).relative_to("sharding") if path.startswith("sharding/") else Path(path)
    found = (Path("tests") / place.parent / f"test_{place.name}", Path("tests") / place.parts[0])
    return tuple(one.as_posix() for one in found if (root / one).exists())


def _caught_by(copy: Copy, mutant: Mutant, paths: tuple[str, ...], seconds: float) -> str:
    """How a mutant ends: `caught`, `survived`, or `not executed` by any test."""
    own = mirrored(copy.root, mutant.path)
    coverage = copy.coverage(paths or own[-1:])
    tests = covering_tests(coverage, mutant, mirrored=own[0] if own else "", seconds=seconds)
    if not tests:
        return "not executed"
    limit = 60 + 10 * sum(coverage[name].seconds for name in tests)  # of wall-clock time, on a busy machine
    return "caught" if copy.catches(mutant, tests, limit) else "survived"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutate")
    parser.add_argument("--sample", type=int, default=20, help="number of mutants")
    parser.add_argument("--seed", type=int, default=0, help="seed of the choice")
    parser.add_argument("--only", nargs="*", default=[], help="start of the paths to change")
    parser.add_argument(
        "--tests", nargs="*", default=[], help="files or folders of tests; those of the room by default"
    )
    parser.add_argument("--seconds", type=float, default=120, help="CPU time of the tests that a mutant may go through")
    parser.add_argument("--lines", type=Path, default=None, help="folder to keep what each test executes")
    parser.add_argument("--json", type=Path, default=None, help="file for the results")
    args = parser.parse_args()
    if sys.version_info < (3, 12):
        raise SystemExit("needs Python 3.12 or newer, which tells the lines that tests execute: make mutate VENV=...")
    mutants = sample(ROOT, args.sample, seed=args.seed, prefixes=tuple(args.only))
    caught: collections.Counter[str] = collections.Counter()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        lines = args.lines or Path(folder) / "lines"
        lines.mkdir(parents=True, exist_ok=True)
        copy = Copy(Path(folder) / "copy", lines)
        forked_pytest.preload()
        for k, mutant in enumerate(mutants, 1):
            end = _caught_by(copy, mutant, tuple(args.tests), args.seconds)
            caught[mutant.room] += end == "caught"
            results.append({"path": mutant.path, "line": mutant.line, "change": mutant.change, "end": end})
            print(f"{k}/{len(mutants)} {mutant.path}:{mutant.line} {end}", flush=True)
            if end != "caught":
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
