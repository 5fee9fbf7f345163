"""Sums, waits, tables and texts of estimates, compared with slow references on tasks made by hand."""

import itertools
import random

import pytest

from sharding.cost import Task, simulate
from sharding.explain.step_time import DEVICE, LINKS, Estimate, TimedOp

PEAK = 8.0


def made(seed: int, num: int = 12) -> Estimate:
    """Tasks of whole seconds on both streams, each after up to two earlier ones."""
    generator = random.Random(seed)
    tasks, parts = [], []
    for k in range(num):
        is_collective = generator.random() < 0.4
        name = generator.choice(["all-gather", "all-reduce"] if is_collective else ["dot_general", "add", "exp"])
        limit = generator.choice(["ici over a", "dcn over b"] if is_collective else ["compute", "memory"])
        after = tuple(dict.fromkeys(f"{j} {parts[j].name}" for j in generator.choices(range(k), k=min(k, 2))))
        stream = LINKS if is_collective and generator.random() < 0.7 else DEVICE
        seconds = float(generator.randrange(4))
        tasks.append(Task(name=f"{k} {name}", stream=stream, seconds=seconds, after=after))
        parts.append(
            TimedOp(
                name=name,
                source=generator.choice(["", "a.py:1", "a.py:2"]),
                seconds=seconds,
                is_collective=is_collective,
                limit=limit,
                matmul_flops=generator.randrange(9) if name == "dot_general" else 0.0,
            )
        )
    return Estimate(
        name="step", chip="v5p", peak_flops_per_second=PEAK, parts=tuple(parts), timeline=simulate(tasks), loops=("",)
    )


ESTIMATES = [made(seed) for seed in range(40)]


def waits(found: Estimate) -> dict[str, float]:
    """Per limit the seconds in which a collective runs and no op does, second by second."""
    spans = [(p, found.timeline[f"{k} {p.name}"]) for k, p in enumerate(found.parts)]

    def running(second: int, *, collectives: bool) -> list[TimedOp]:
        return [
            p for p, span in spans if p.is_collective == collectives and span.start_seconds <= second < span.end_seconds
        ]

    sums: dict[str, float] = {}
    for second in range(round(found.seconds)):
        if not running(second, collectives=False):
            for limit in {p.limit for p in running(second, collectives=True)}:
                sums[limit] = sums.get(limit, 0.0) + 1
    return sums


def test_what_bounds_a_step_second_by_second():
    some_overlap = 0
    for found in ESTIMATES:
        expected = waits(found)
        communication: dict[str, float] = {}
        for p in found.parts:
            into = communication if p.is_collective else expected
            into[p.limit] = into.get(p.limit, 0.0) + p.seconds
        shown = {limit: seconds for limit, seconds in found.by_limit.items() if seconds}
        assert shown == {limit: seconds for limit, seconds in expected.items() if seconds}
        assert list(found.by_limit.values()) == sorted(found.by_limit.values(), reverse=True)
        some_overlap += any(shown.get(limit, 0) < seconds for limit, seconds in communication.items())
    assert some_overlap > 10


def test_sums():
    for found in ESTIMATES:
        assert found.compute_seconds == sum(p.seconds for p in found.parts if not p.is_collective)
        assert found.communication_seconds == sum(p.seconds for p in found.parts if p.is_collective)
        ends = [found.timeline[f"{k} {p.name}"].end_seconds for k, p in enumerate(found.parts)]
        assert found.seconds == max(ends)
        assert found.exposed_seconds == found.seconds - found.compute_seconds
        assert found.seconds_at_peak == sum(p.matmul_flops for p in found.parts) / PEAK
        assert found.mfu == pytest.approx(found.seconds_at_peak / found.seconds)
        of_line = {line: sum(p.seconds for p in found.parts if p.source == line) for line in ("", "a.py:1", "a.py:2")}
        assert found.by_source == {line: of_line[line] for line in found.by_source}
        assert {line for line, seconds in of_line.items() if seconds} <= found.by_source.keys()
        assert list(found.by_source.values()) == sorted(found.by_source.values(), reverse=True)


def test_tables_have_one_row_per_op_line_and_limit():
    for found in ESTIMATES:
        rows, totals = (table.rows for table in found.tables())
        keys = {(p.name, p.source, p.limit) for p in found.parts}
        assert {row[:3] for row in rows} == keys and len(rows) == len(keys)
        for name, source, limit, num, seconds in rows:
            own = [p for p in found.parts if (p.name, p.source, p.limit) == (name, source, limit)]
            assert (num, seconds) == (len(own), sum(p.seconds for p in own))
        assert all(a[-1] >= b[-1] for a, b in itertools.pairwise(rows))
        sums = (found.compute_seconds, found.communication_seconds, found.exposed_seconds)
        parts = ("compute", "communication", "idle")
        assert list(totals) == [(part, n, n / found.seconds) for part, n in zip(parts, sums, strict=True)]


def test_the_text_has_at_most_ten_lines_of_the_program():
    for found in ESTIMATES:
        head, _, lines = str(found).partition("\n\n")
        assert f"step on v5p: {found.seconds:g} s per step" in head
        assert "one iteration of the loop of unknown length at an unknown line" in head
        assert "does not fold" not in head
        assert len(lines.splitlines()) == len(found.by_source) and ("unknown" in lines) == ("" in found.by_source)
    parts = tuple(
        TimedOp(name="add", source=f"a.py:{k}", seconds=1.0, is_collective=False, limit="memory") for k in range(12)
    )
    tasks = [Task(name=f"{k} add", stream=DEVICE, seconds=1.0) for k in range(12)]
    long = Estimate(name="x", chip="y", peak_flops_per_second=0.0, parts=parts, timeline=simulate(tasks), folds=False)
    assert str(long).count("a.py") == 10 and "the mesh does not fold onto the torus of y" in str(long)
    assert long.mfu == 0 and long.bound_text == "memory 100%"


def test_an_empty_program():
    empty = Estimate(name="x", chip="y", peak_flops_per_second=PEAK, parts=(), timeline=simulate([]))
    assert (empty.seconds, empty.mfu, empty.bound_text, empty.by_limit) == (0, 0, "", {})
    assert [row[-1] for row in empty.tables()[1].rows] == [0, 0, 0]


def test_shares_of_what_bounds_a_step():
    found = next(one for one in ESTIMATES if len([s for s in one.by_limit.values() if s]) > 2)
    expected = [f"{limit} {100 * s / found.seconds:.0f}%" for limit, s in found.by_limit.items() if s]
    assert found.bound_text == ", ".join(expected)
