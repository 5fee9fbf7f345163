"""Which lines of the library each test executes, so that a mutant goes through those tests alone that can see it."""

from __future__ import annotations

import inspect
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from .mutants import Mutant


@dataclass(frozen=True, slots=True, kw_only=True)
class TestLines:
    """What one test executes."""

    __test__ = False

    seconds: float
    lines: dict[str, set[int]]
    """Path relative to the root -> lines, without those that an import alone executes."""

    @property
    def num_lines(self) -> int:
        return sum(map(len, self.lines.values()))


Coverage = dict[str, TestLines]
"""Node id of a test -> what it executes."""


@dataclass
class LineRecorder:
    """A pytest plugin that writes the lines which each test executes, by `sys.monitoring` of Python 3.12."""

    root: Path
    rooms: tuple[str, ...]
    file: Path
    found: dict[str, Any] = field(default_factory=dict)
    hits: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    paths: dict[str, str] = field(default_factory=dict)
    """Name of a file as it was imported -> its path relative to the root, or nothing."""

    def pytest_sessionstart(self) -> None:
        monitoring = sys.monitoring
        monitoring.use_tool_id(monitoring.COVERAGE_ID, "mutate")
        monitoring.register_callback(monitoring.COVERAGE_ID, monitoring.events.LINE, self._line)
        monitoring.set_events(monitoring.COVERAGE_ID, monitoring.events.LINE)

    def _line(self, code: CodeType, line: int) -> Any:
        is_function = (
            code.co_flags & inspect.CO_OPTIMIZED
        )  # modules and classes run in the test that imports them first
        if is_function and (path := self._path(code.co_filename)):
            self.hits[path].add(line)
        return sys.monitoring.DISABLE

    def _path(self, name: str) -> str:
        """The path of a file in the rooms, however it was imported: `sharding/models` is a link to `models`."""
        if name not in self.paths:
            file, root = Path(name).resolve(), self.root.resolve()
            path = file.relative_to(root).as_posix() if file.is_relative_to(root) else ""
            self.paths[name] = path if path.startswith(self.rooms) else ""
        return self.paths[name]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.hits.clear()
        sys.monitoring.restart_events()
        begun = time.process_time()
        result = yield
        lines = {path: sorted(found) for path, found in self.hits.items()}
        self.found[item.nodeid] = {"seconds": time.process_time() - begun, "lines": lines}
        return result

    def pytest_sessionfinish(self) -> None:
        sys.monitoring.free_tool_id(sys.monitoring.COVERAGE_ID)
        self.file.write_text(json.dumps(self.found))


@dataclass(frozen=True)
class InOrder:
    """A pytest plugin that runs given tests alone, in a given order."""

    names: tuple[str, ...]

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        place = {name: k for k, name in enumerate(self.names)}
        items[:] = sorted((item for item in items if item.nodeid in place), key=lambda item: place[item.nodeid])


def read(file: Path) -> Coverage:
    """Returns what a recorder wrote."""
    return {
        name: TestLines(seconds=one["seconds"], lines={path: set(lines) for path, lines in one["lines"].items()})
        for name, one in json.loads(file.read_text()).items()
    }


def covering_tests(coverage: Coverage, mutant: Mutant, *, mirrored: str, seconds: float) -> tuple[str, ...]:
    """Returns the tests that execute a mutant's lines, the most specific first.

    Args:
        coverage: what each test executes.
        mutant: where nothing but an import executes it, all tests count.
        mirrored: the test file of the changed file, whose tests come first.
        seconds: tests are left out that would take longer than this together.
    """
    lines = {name: test.lines[mutant.path] for name, test in coverage.items() if mutant.path in test.lines}
    covering = [name for name in lines if not lines[name].isdisjoint(mutant.lines)]
    covering = covering or [name for name in lines if not lines[name].isdisjoint(mutant.statement)]
    if not covering and mutant.at_import:
        covering = list(coverage)
    covering.sort(key=lambda name: (not name.startswith(mirrored + "::"), name not in lines, coverage[name].num_lines))
    chosen, total = [], 0.0
    for name in covering:
        total += coverage[name].seconds
        if chosen and total > seconds:
            break
        chosen.append(name)
    return tuple(chosen)
