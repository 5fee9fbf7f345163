"""Pipeline bubbles: the idle fraction measured by profiling, compared with the simulated one.

    python -m tests.benchmarks.bubbles                     # percent executed and simulated, by schedule
    python -m tests.benchmarks.bubbles --json bubbles.json # `pipeline` has the same rows

The model is that of `pipeline`, with as many stages as cores, up to four: with more, devices wait for a core instead of
each other. XLA runs each program with one thread, else a device would be faster while others are idle. A program runs
from the start of its first op to the end of its last; a task is the program of its stage, plus the embedding or loss
program at the first or last stage. Executed is the idle fraction of device time between a step's first and last task;
simulated is the bubble fraction of the schedule if each task takes the mean time of its kind and stage in this step.
Reported are the medians over steps of both and of their difference.
"""

from __future__ import annotations

import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax

import sharding
from sharding import pipeline

from . import command_line, gpt_workload, result_file
from .contenders import DEVICES, start
from .pipeline import MICROBATCHES, SCHEDULES, piped
from .result_file import Row, num_cores

STEPS, WARM = 7, 2
PROGRAMS: dict[str, tuple[pipeline.Kind, ...]] = {
    "enter": ("forward",),
    "forward": ("forward",),
    "loss": ("forward",),
    "backward": ("backward",),
    "backward_input": ("backward-input",),
    "backward_weight": ("backward-weight",),
    "entered": ("backward", "backward-input"),
}
"""Program -> the kinds of tasks that run it; `enter`, `entered` and `loss` run only at the first or last stage."""


@dataclass(frozen=True)
class Options:
    """The output file."""

    json: Path | None = None
    """Output file of the figures."""


class Run(NamedTuple):
    """One run of a program on a device; times in seconds."""

    device: int
    program: str
    begin: float
    end: float


class Bubbles(NamedTuple):
    """Idle fractions of device time in a step."""

    executed: float
    simulated: float


def executed_fraction(runs: Sequence[Run]) -> float:
    """The idle fraction of device time, from the start of the first run to the end of the last."""
    span = max(run.end for run in runs) - min(run.begin for run in runs)
    devices = {run.device for run in runs}
    return 1 - sum(_busy([run for run in runs if run.device == device]) for device in devices) / (len(devices) * span)


def _busy(runs: Iterable[Run]) -> float:
    """Seconds during which at least one run is active."""
    total, until = 0.0, -float("inf")
    for run in sorted(runs, key=lambda run: run.begin):
        total += max(0.0, run.end - max(run.begin, until))
        until = max(until, run.end)
    return total


def simulated_fraction(schedule: pipeline.Schedule, runs: Sequence[Run]) -> float:
    """The simulated bubble fraction if each task takes the mean time of its kind and stage."""
    seconds = defaultdict[tuple[str, int], float](float)
    for task, run in matched(schedule, runs):
        seconds[task.kind, task.stage] += (run.end - run.begin) / schedule.microbatches

    def backward(task: pipeline.Task) -> float:
        kinds = ("backward",) if task.kind == "backward" else ("backward-input", "backward-weight")
        return sum(seconds[kind, task.stage] for kind in kinds)

    def weight(task: pipeline.Task) -> float:
        return seconds["backward-weight", task.stage]

    def forward(task: pipeline.Task) -> float:
        return seconds["forward", task.stage]

    return schedule.simulate(forward=forward, backward=backward, weight=weight).bubble_fraction


def matched(schedule: pipeline.Schedule, runs: Sequence[Run]) -> list[tuple[pipeline.Task, Run]]:
    """Pairs each run with its task: on a device, the runs of a program are in task order."""
    found = []
    for (device, program), own in _grouped(runs).items():
        tasks = [task for task in schedule.orders[device] if _runs_in(task, program, last=schedule.stages - 1)]
        found += zip(tasks, own, strict=True)
    return found


def _grouped(runs: Iterable[Run]) -> dict[tuple[int, str], list[Run]]:
    """(device, program) -> runs by start time."""
    found = defaultdict[tuple[int, str], list[Run]](list)
    for run in sorted(runs, key=lambda run: run.begin):
        found[run.device, run.program].append(run)
    return found


def _runs_in(task: pipeline.Task, program: str, *, last: int) -> bool:
    """Whether a task runs a program."""
    stage = {"enter": 0, "entered": 0, "loss": last}.get(program, task.stage)
    return task.kind in PROGRAMS[program] and task.stage == stage


def profiled(step: Any) -> list[Run]:
    """The runs of a pipeline's programs during `step()`."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            jax.block_until_ready(step())
        (file,) = Path(folder).rglob("*.xplane.pb")
        return _runs(jax.profiler.ProfileData.from_file(str(file)))


def _runs(profile: Any) -> list[Run]:
    times = defaultdict[tuple[Any, ...], list[float]](list)
    for event in (event for plane in profile.planes for line in plane.lines for event in line.events):
        facts = dict(event.stats)
        program = str(facts.get("hlo_module", "")).removeprefix("jit_")
        if program in PROGRAMS:
            key = facts["device_ordinal"], program, facts["program_id"], facts["run_id"]
            times[key] += [event.start_ns, event.start_ns + event.duration_ns]
    return [Run(device, program, min(ns) / 1e9, max(ns) / 1e9) for (device, program, *_), ns in times.items()]


def measured(name: str, stages: int) -> list[Bubbles]:
    """The bubbles of each step of a schedule, after warm-up."""
    contender, schedule = piped(name, "mpmd", stages), SCHEDULES[name](stages=stages, microbatches=MICROBATCHES)
    tokens = gpt_workload.tokens(steps=WARM + STEPS)
    found = []
    for batch in tokens:
        runs = profiled(lambda batch=batch: contender.run([batch], timed=False))
        found.append(Bubbles(executed_fraction(runs), simulated_fraction(schedule, runs)))
    return found[WARM:]


def main(options: Options) -> None:
    """Prints the medians of each schedule and writes them."""
    stages = min(DEVICES, num_cores())
    start(stages)
    with sharding.mesh(pipe=stages):
        rows = [_row(name, stages, measured(name, stages)) for name in SCHEDULES]
    result = result_file.measured("bubbles", options, rows, num_devices=stages)
    print("\n".join(map(str, rows)), result.where, sep="\n")
    if options.json is not None:
        result.save(options.json)


def _row(name: str, stages: int, bubbles: Sequence[Bubbles]) -> Row:
    columns = {
        "executed_percent": [each.executed for each in bubbles],
        "simulated_percent": [each.simulated for each in bubbles],
        "difference_percent": [each.executed - each.simulated for each in bubbles],
    }
    medians = {column: round(100 * statistics.median(values), 1) for column, values in columns.items()}
    return {"kind": "idle share", "name": name, "executor": "mpmd", "num_devices": stages, **medians}


if __name__ == "__main__":
    command_line.run(main, Options, __doc__)
