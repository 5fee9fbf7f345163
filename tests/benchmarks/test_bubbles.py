"""Bubble fractions from profiled runs: for runs exactly as simulated, they equal the simulated fraction."""

import itertools

import pytest

from benchmarks.bubbles import Run, executed_fraction, simulated_fraction
from sharding.pipeline import schedules

PROGRAM = {kind: kind.replace("-", "_") for kind in ("forward", "backward", "backward-input", "backward-weight")}
MADE = [
    schedules.gpipe(stages=3, microbatches=4),
    schedules.one_f_one_b(stages=3, microbatches=4),
    schedules.interleaved(stages=2, microbatches=4, chunks=2),
    schedules.zb_h1(stages=3, microbatches=4),
    schedules.zb_v(stages=2, microbatches=4),
]


def runs(schedule, simulation):
    rows = zip(schedule.orders, simulation.starts, simulation.ends, strict=True)
    return [
        Run(device, PROGRAM[task.kind], begin, end)
        for device, row in enumerate(rows)
        for task, begin, end in zip(*row, strict=True)
    ]


@pytest.mark.parametrize("schedule", MADE, ids=lambda schedule: schedule.name)
def test_runs_as_simulated(schedule):
    times = range(2, 2 + schedule.stages)
    simulation = schedule.simulate(forward=times, backward=[5 * t for t in times], weight=[2 * t for t in times])
    found = runs(schedule, simulation)
    assert 0 < simulation.bubble_fraction < 1
    assert executed_fraction(found) == pytest.approx(simulation.bubble_fraction)
    assert simulated_fraction(schedule, found) == pytest.approx(simulation.bubble_fraction)


def test_a_task_of_two_programs_takes_as_long_as_both():
    schedule = schedules.gpipe(stages=2, microbatches=1)
    rows = [(0, "enter", 1), (0, "forward", 2), (1, "forward", 2), (1, "loss", 3)]
    rows += [(1, "backward", 4), (0, "backward", 4), (0, "entered", 2)]
    ends = list(itertools.accumulate(seconds for *_, seconds in rows))
    found = [
        Run(device, program, end - seconds, end) for (device, program, seconds), end in zip(rows, ends, strict=True)
    ]
    assert executed_fraction(found) == pytest.approx(1 / 2)
    assert simulated_fraction(schedule, found) == pytest.approx(1 / 2)


def test_overlapping_runs_count_once():
    both = [Run(0, "forward", 0, 6), Run(0, "loss", 2, 4), Run(0, "backward", 5, 7), Run(1, "forward", 9, 10)]
    assert executed_fraction(both) == pytest.approx(1 - 8 / 20)


def test_runs_without_tasks_are_refused():
    schedule = schedules.gpipe(stages=2, microbatches=2)
    with pytest.raises(ValueError, match="longer"):
        simulated_fraction(schedule, [Run(0, "forward", i, i + 1) for i in range(3)])
