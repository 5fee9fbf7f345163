"""All pipeline schedules on a grid of sizes, random schedules, and a slow tick-by-tick reference simulator."""

import functools
import itertools
import random
from fractions import Fraction

import pytest
from hypothesis import strategies as st

from sharding.pipeline import Schedule, Task, schedules

SIZES = [
    (1, 1),
    (1, 3),
    (2, 1),
    (2, 2),
    (2, 4),
    (2, 8),
    (3, 2),
    (3, 3),
    (3, 6),
    (4, 3),
    (4, 4),
    (4, 8),
    (5, 10),
    (6, 12),
]

GENERATORS = {
    "gpipe": schedules.gpipe,
    "one_f_one_b": schedules.one_f_one_b,
    "eager_1f1b": schedules.eager_1f1b,
    "dapple-A": functools.partial(schedules.dapple, policy="A"),
    "dapple-B": functools.partial(schedules.dapple, policy="B"),
    "dapple-A-2": functools.partial(schedules.dapple, policy="A", most_in_flight=2),
    "interleaved-1": functools.partial(schedules.interleaved, chunks=1),
    "interleaved-2": functools.partial(schedules.interleaved, chunks=2),
    "interleaved-3": functools.partial(schedules.interleaved, chunks=3),
    "chimera": schedules.chimera,
    "chimera-doubling": functools.partial(schedules.chimera, concatenation="doubling"),
    "zb_h1": schedules.zb_h1,
    "zb_h2": schedules.zb_h2,
    "zb_v": schedules.zb_v,
    "dualpipe_v": schedules.dualpipe_v,
    "terapipe-1": functools.partial(schedules.terapipe, slices=1),
    "terapipe-3": functools.partial(schedules.terapipe, slices=3),
    "pipedream": schedules.pipedream,
    "pipedream-vertical": functools.partial(schedules.pipedream, vertical_sync=True),
    "pipedream_2bw": schedules.pipedream_2bw,
    "hetpipe": schedules.hetpipe,
    "hetpipe-apart": functools.partial(schedules.hetpipe, clock_distance=1),
}


def is_valid_size(name, stages, microbatches):
    """Whether a schedule supports these sizes."""
    multiple = {"chimera-doubling": 2 * stages, "chimera": stages, "pipedream_2bw": stages}
    multiple |= {name: stages for name in GENERATORS if name.startswith("interleaved")}
    return microbatches % multiple.get(name, 1) == 0 and not (name.startswith("chimera") and stages % 2)


GRID = [(name, *sizes) for name, sizes in itertools.product(GENERATORS, SIZES) if is_valid_size(name, *sizes)]

ASYNCHRONOUS = ("pipedream", "pipedream-vertical", "pipedream_2bw", "hetpipe", "hetpipe-apart")
SLICED = [case for case in GRID if case[0] == "terapipe-3"]
SYNCHRONOUS = [case for case in GRID if case[0] not in ASYNCHRONOUS and case not in SLICED]
"""Schedules with one weight version per step and unsliced microbatches."""


def make_schedule(name, stages, microbatches):
    return GENERATORS[name](stages=stages, microbatches=microbatches)


def cases_by_schedule(grid):
    """`pytest.mark.parametrize` arguments with one list of cases per schedule, for tests that loop over sizes."""
    return "cases", [pytest.param([case for case in grid if case[0] == name], id=name) for name in names_in(grid)]


def names_in(grid):
    return dict.fromkeys(case[0] for case in grid)


def predecessors(schedule: Schedule, task: Task):
    """Dependencies of a task: (kinds, any of which satisfies it, stage, microbatch, slice)."""
    output, gradient, freed = ("forward",), ("backward", "backward-input"), ("backward", "backward-weight")
    stage, microbatch, part = task.stage, task.microbatch, task.slice
    if task.kind == "forward":
        if stage > 0:
            yield output, stage - 1, microbatch, part
        if part > 0:
            yield output, stage, microbatch, part - 1
        for earlier in range(task.version * schedule.microbatches_per_update):
            yield from ((freed, stage, earlier, any_part) for any_part in range(schedule.slices))
    elif task.kind == "backward-weight":
        yield gradient, stage, microbatch, part
    else:
        yield output, stage, microbatch, part
        if stage + 1 < schedule.stages:
            yield gradient, stage + 1, microbatch, part
        if part + 1 < schedule.slices:
            yield gradient, stage, microbatch, part + 1


def simulate_by_clock(schedule: Schedule, duration, send=0):
    """Start times of each device's tasks, or None on deadlock; durations are integers >= 1."""
    ends = {}  # of a task: (moment, device)
    starts = [[] for _ in schedule.orders]
    total = sum(len(order) for order in schedule.orders)

    def arrived(kinds, stage, microbatch, part, device, now):
        for task, (end, there) in ends.items():
            if task.kind in kinds and (task.stage, task.microbatch, task.slice) == (stage, microbatch, part):
                return now >= end + (send if there != device else 0)
        return False

    free = [0] * len(schedule.orders)
    moment = 0
    while len(ends) < total:
        for device, order in enumerate(schedule.orders):
            if len(starts[device]) == len(order) or free[device] > moment:
                continue
            task = order[len(starts[device])]
            if all(arrived(*what, device, moment) for what in predecessors(schedule, task)):
                starts[device].append(moment)
                free[device] = moment + duration(task)
                ends[task] = (free[device], device)
        if moment > max(free) + send:
            return None
        moment += 1
    return tuple(map(tuple, starts))


def simulate_in_lockstep(schedule: Schedule):
    """Task of each device per tick, with results available in the next tick; None on deadlock."""
    done, rows = set(), []
    places = [0] * len(schedule.orders)
    while any(place < len(order) for place, order in zip(places, schedule.orders, strict=True)):
        row = []
        for place, order in zip(places, schedule.orders, strict=True):
            task = order[place] if place < len(order) else None
            ready = task is not None and all(
                any((kind, *where) in done for kind in kinds) for kinds, *where in predecessors(schedule, task)
            )
            row.append(task if ready else None)
        if not any(row):
            return None
        places = [place + (task is not None) for place, task in zip(places, row, strict=True)]
        done |= {(task.kind, task.stage, task.microbatch, task.slice) for task in row if task}
        rows.append(tuple(row))
    return tuple(rows)


def peak_activations(schedule: Schedule, simulation):
    """Peak number of stashed activations per device, sampled in the middle of every unit of time."""
    held = []
    for order, starts, ends in zip(schedule.orders, simulation.starts, simulation.ends, strict=True):
        begun = {task[1:4]: start for task, start in zip(order, starts, strict=True) if task.kind == "forward"}
        freed = {
            task[1:4]: end
            for task, end in zip(order, ends, strict=True)
            if task.kind in ("backward", "backward-weight")
        }
        moments = [Fraction(2 * k + 1, 2) for k in range(int(simulation.makespan))]
        held.append(max(sum(begun[cell] < at < freed[cell] for cell in begun) for at in moments))
    return [count / (schedule.chunks * schedule.slices) for count in held]


def peak_weight_versions(schedule: Schedule):
    """Peak number of weight versions of a stage per device, newest or still needed, after any task."""
    found = []
    for order in schedule.orders:
        counts = []
        for place in range(len(order)):
            past, future = order[: place + 1], order[place + 1 :]
            for stage in {task.stage for task in order}:
                left = [
                    t.microbatch // schedule.microbatches_per_update
                    for t in future
                    if t.stage == stage and frees_activation(t)
                ]
                updated = [
                    t.microbatch // schedule.microbatches_per_update
                    for t in past
                    if t.stage == stage and frees_activation(t)
                ]
                newest = next(v for v in itertools.count() if v not in updated or v in left)
                used = {t.version for t in future if t.stage == stage and t.version <= newest}
                if any(t.stage == stage for t in past):
                    counts.append(len(used | {newest}))
        found.append(max(counts))
    return found


def frees_activation(task: Task):
    return task.kind in ("backward", "backward-weight")


@st.composite
def random_schedules(draw):
    """Random tasks over devices, each device's in the order of some valid execution."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    stages, microbatches, slices = rng.randint(1, 3), rng.randint(1, 3), rng.randint(1, 2)
    return random_schedule(rng, stages, microbatches, slices, rng.choice([microbatches, 1]))


@st.composite
def synchronous_schedules(draw):
    """Random schedules with unsliced microbatches and one weight version."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    stages, microbatches = rng.randint(1, 4), rng.randint(1, 4)
    return random_schedule(rng, stages, microbatches, 1, microbatches)


def random_schedule(rng, stages, microbatches, slices, per_update):
    """Random tasks over at most three devices, with full and split backward passes."""
    devices = rng.randint(1, 3)
    home = {(s, m): rng.randrange(devices) for s in range(stages) for m in range(microbatches)}
    split = {cell: rng.random() < 0.5 for cell in home}
    version = {(s, m): rng.randint(0, m // per_update) for s, m in home}
    tasks = {
        Task(kind, s, m, part, version[s, m])
        for s, m in home
        for part in range(slices)
        for kind in (("forward", "backward-input", "backward-weight") if split[s, m] else ("forward", "backward"))
    }
    every = Schedule(
        name="random",
        orders=[sorted(tasks)],
        stages=stages,
        microbatches=microbatches,
        slices=slices,
        microbatches_per_update=per_update,
    )
    return random_execution(every, home, rng)


def random_execution(every, home, rng):
    """The tasks on their devices, in the order of a random valid execution."""
    left, done, orders = sorted(every.orders[0]), set(), {}
    while left:
        ready = [
            task
            for task in left
            if all(any((kind, *where) in done for kind in kinds) for kinds, *where in predecessors(every, task))
        ]
        task = rng.choice(ready)
        left.remove(task)
        done.add((task.kind, task.stage, task.microbatch, task.slice))
        orders.setdefault(home[task.stage, task.microbatch], []).append(task)
    return Schedule(
        name="random",
        orders=list(orders.values()),
        stages=every.stages,
        microbatches=every.microbatches,
        slices=every.slices,
        microbatches_per_update=every.microbatches_per_update,
    )
