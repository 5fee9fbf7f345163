"""`python -m tests.mutate`: puts random faults into a copy of the library and counts those that the tests catch.

    python -m tests.mutate --sample 40 --seed 0                # tests of the changed file, then of its room
    python -m tests.mutate --only sharding/propagation         # of one room
    python -m tests.mutate --tests tests/cost tests/explain    # other tests than those of the rooms
    python -m tests.mutate --lines /tmp/lines                  # keep what each test executes for the next run
    python -m tests.mutate --slow                              # also through slow tests, where the quick ones miss it

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

QUICK, SLOW = "not slow", "slow"
"""The markers that select tests."""

USERS_OF_THE_FACE = ("tests/graph", "tests/jit", "tests/explain")
"""The tests of files that are in no room, such as `spec.py`, beside their own."""

SUFFIXES = {QUICK: "", SLOW: "_slow"}
"""Of the files of what the tests execute that a marker selects."""


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

    def coverage(self, paths: tuple[str, ...], marked: str) -> Coverage:
        """What each test of some paths executes that is marked as asked, from a run without a fault."""
        found: Coverage = {}
        for path in paths:
            file = self.lines / f"{path.replace('/', '_')}{SUFFIXES[marked]}.json"
            if not file.exists():
                recorder = LineRecorder(self.root, tuple(f"{room}/" for room in ROOMS), file)
                ended = forked_pytest.run(self.root, ["-m", marked, path], plugins=[recorder])
                if ended not in (0, 5):  # 5: no test was selected
                    raise SystemExit(f"{path} fails without any fault")
            found |= read(file)
        return found

    def catches(self, mutant: Mutant, tests: tuple[str, ...], marked: str, seconds: float) -> bool:
        """Whether one of the tests fails with a mutant, or all take longer than some seconds."""
        file = self.root / mutant.path
        before = file.read_text()
        file.write_text(mutant.source)
        files = sorted({name.split("::")[0] for name in tests})
        try:
            arguments = ["-m", marked, *files]
            return forked_pytest.run(self.root, arguments, plugins=[InOrder(tests)], seconds=seconds) != 0
        finally:
            file.write_text(before)


def mirrored(root: Path, path: str) -> tuple[str, tuple[str, ...]]:
    """The tests of a changed file, and all that may see the change: `tests/` mirrors the tree.

    These are the tests of its room. A file outside of the rooms is used in all of them.
    """
    place = Path(path).relative_to("sharding") if path.startswith("sharding/") else Path(path)
    own = f"tests/{place.parent / f'test_{place.name}'}"
    rooms = [f"tests/{place.parts[0]}"] if len(place.parts) > 1 else [own, *USERS_OF_THE_FACE]
    return own, tuple(one for one in rooms if (root / one).exists())


def _end(copy: Copy, mutant: Mutant, paths: tuple[str, ...], marked: str, seconds: float) -> str:
    """How a mutant ends that goes through the tests of a marker: `caught`, `survived`, or `not executed` by any."""
    own, rooms = mirrored(copy.root, mutant.path)
    coverage = copy.coverage(paths or rooms, marked)
    tests = covering_tests(coverage, mutant, mirrored=own, seconds=seconds)
    if not tests:
        return "not executed"
    limit = 60 + 10 * sum(coverage[name].seconds for name in tests)  # of wall-clock time, on a busy machine
    return "caught" if copy.catches(mutant, tests, marked, limit) else "survived"


def _end_of_slow(copy: Copy, mutant: Mutant, paths: tuple[str, ...], seconds: float, quick: str) -> str:
    """How a mutant ends that quick tests miss: `caught by slow` ones, or as with the quick ones if none executes it."""
    slow = _end(copy, mutant, paths, SLOW, seconds)
    return {"caught": "caught by slow", "survived": "survived", "not executed": quick}[slow]


def _print_shares(mutants: list[Mutant], ends: list[str], caught: tuple[str, ...], tests: str) -> None:
    """Prints how many mutants of each room ended in one of some ways."""
    total = collections.Counter(mutant.room for mutant in mutants)
    found = collections.Counter(mutant.room for mutant, end in zip(mutants, ends, strict=True) if end in caught)
    for room in sorted(total):
        print(f"{room:32} {found[room]:3} of {total[room]}")
    share = 100 * found.total() / max(1, len(mutants))
    print(f"{'all':32} {found.total():3} of {len(mutants)} caught by {tests} tests ({share:.0f} %)")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutate")
    parser.add_argument("--sample", type=int, default=20, help="number of mutants")
    parser.add_argument("--seed", type=int, default=0, help="seed of the choice")
    parser.add_argument("--only", nargs="*", default=[], help="start of the paths to change")
    parser.add_argument(
        "--tests", nargs="*", default=[], help="files or folders of tests; those of the room by default"
    )
    parser.add_argument("--slow", action="store_true", help="also run slow tests, on the mutants that quick ones miss")
    parser.add_argument("--seconds", type=float, default=120, help="CPU time of the tests that a mutant may go through")
    parser.add_argument("--lines", type=Path, default=None, help="folder to keep what each test executes")
    parser.add_argument("--json", type=Path, default=None, help="file for the results")
    args = parser.parse_args()
    if sys.version_info < (3, 12):
        raise SystemExit("needs Python 3.12 or newer, which tells the lines that tests execute: make mutate VENV=...")
    mutants = sample(ROOT, args.sample, seed=args.seed, prefixes=tuple(args.only))
    ends: list[str] = []
    results = []
    with tempfile.TemporaryDirectory() as folder:
        lines = args.lines or Path(folder) / "lines"
        lines.mkdir(parents=True, exist_ok=True)
        copy = Copy(Path(folder) / "copy", lines)
        forked_pytest.preload()
        for k, mutant in enumerate(mutants, 1):
            end = _end(copy, mutant, tuple(args.tests), QUICK, args.seconds)
            if args.slow and end != "caught":
                end = _end_of_slow(copy, mutant, tuple(args.tests), args.seconds, end)
            ends.append(end)
            results.append({"path": mutant.path, "line": mutant.line, "change": mutant.change, "end": end})
            print(f"{k}/{len(mutants)} {mutant.path}:{mutant.line} {end}", flush=True)
            if end != "caught":
                print(mutant.change, flush=True)
    _print_shares(mutants, ends, ("caught",), "quick")
    if args.slow:
        _print_shares(mutants, ends, ("caught", "caught by slow"), "quick and slow")
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
