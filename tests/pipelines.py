"""Every pipeline schedule on a grid of sizes, random ones, and a slow clock that looks at all devices all the time."""

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


def possible(name, stages, microbatches):
    """Whether a schedule is for such sizes."""
    multiple = {"chimera-doubling": 2 * stages, "chimera": stages, "pipedream_2bw": stages}
    multiple |= {name: stages for name in GENERATORS if name.startswith("interleaved")}
    return microbatches % multiple.get(name, 1) == 0 and not (name.startswith("chimera") and stages % 2)


GRID = [(name, *sizes) for name, sizes in itertools.product(GENERATORS, SIZES) if possible(name, *sizes)]

ASYNCHRONOUS = ("pipedream", "pipedream-vertical", "pipedream_2bw", "hetpipe", "hetpipe-apart")
SLICED = [case for case in GRID if case[0] == "terapipe-3"]
SYNCHRONOUS = [case for case in GRID if case[0] not in ASYNCHRONOUS and case not in SLICED]
"""Those whose gradients of a step are all of the same weights, and of whole microbatches."""


def made(name, stages, microbatches):
    return GENERATORS[name](stages=stages, microbatches=microbatches)


def by_name(grid):
    """The cases of a grid as one list per schedule: (parameter, values) of a test that goes through the sizes."""
    return "cases", [pytest.param([case for case in grid if case[0] == name], id=name) for name in names_in(grid)]


def names_in(grid):
    return dict.fromkeys(case[0] for case in grid)


def awaited(schedule: Schedule, task: Task):
    """What must be done before a task: (kinds of which one does it, stage, microbatch, slice)."""
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


def clock(schedule: Schedule, duration, send=0):
    """Per device when its tasks begin, or None where they never do; durations are whole numbers of at least 1."""
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
            if all(arrived(*what, device, moment) for what in awaited(schedule, task)):
                starts[device].append(moment)
                free[device] = moment + duration(task)
                ends[task] = (free[device], device)
        if moment > max(free) + send:
            return None
        moment += 1
    return tuple(map(tuple, starts))


def lockstep_clock(schedule: Schedule):
    """Per tick what each device does, where results of a tick are there in the next; None where they never are."""
    done, rows = set(), []
    places = [0] * len(schedule.orders)
    while any(place < len(order) for place, order in zip(places, schedule.orders, strict=True)):
        row = []
        for place, order in zip(places, schedule.orders, strict=True):
            task = order[place] if place < len(order) else None
            ready = task is not None and all(
                any((kind, *where) in done for kind in kinds) for kinds, *where in awaited(schedule, task)
            )
            row.append(task if ready else None)
        if not any(row):
            return None
        places = [place + (task is not None) for place, task in zip(places, row, strict=True)]
        done |= {(task.kind, task.stage, task.microbatch, task.slice) for task in row if task}
        rows.append(tuple(row))
    return tuple(rows)


def most_held(schedule: Schedule, simulation):
    """Per device the most activations that it holds, looked at in the middle of every unit of time."""
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


def most_versions(schedule: Schedule):
    """Per device the most versions of a stage's weights that are newest or still to be used, after any task."""
    found = []
    for order in schedule.orders:
        counts = []
        for place in range(len(order)):
            past, future = order[: place + 1], order[place + 1 :]
            for stage in {task.stage for task in order}:
                left = [
                    t.microbatch // schedule.microbatches_per_update for t in future if t.stage == stage and frees(t)
                ]
                made = [t.microbatch // schedule.microbatches_per_update for t in past if t.stage == stage and frees(t)]
                newest = next(v for v in itertools.count() if v not in made or v in left)
                used = {t.version for t in future if t.stage == stage and t.version <= newest}
                if any(t.stage == stage for t in past):
                    counts.append(len(used | {newest}))
        found.append(max(counts))
    return found


def frees(task: Task):
    return task.kind in ("backward", "backward-weight")


@st.composite
def random_schedules(draw):
    """Tasks over devices by chance, each device's in an order that some run of all of them has."""
    chance = random.Random(draw(st.integers(0, 2**32)))
    stages, microbatches, slices = chance.randint(1, 3), chance.randint(1, 3), chance.randint(1, 2)
    return by_chance(chance, stages, microbatches, slices, chance.choice([microbatches, 1]))


@st.composite
def synchronous_schedules(draw):
    """The same, of whole microbatches through one version of the weights."""
    chance = random.Random(draw(st.integers(0, 2**32)))
    stages, microbatches = chance.randint(1, 4), chance.randint(1, 4)
    return by_chance(chance, stages, microbatches, 1, microbatches)


def by_chance(chance, stages, microbatches, slices, per_update):
    """Tasks over at most three devices, whole backwards and parts of them."""
    devices = chance.randint(1, 3)
    home = {(s, m): chance.randrange(devices) for s in range(stages) for m in range(microbatches)}
    split = {cell: chance.random() < 0.5 for cell in home}
    version = {(s, m): chance.randint(0, m // per_update) for s, m in home}
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
    return shuffled(every, home, chance)


def shuffled(every, home, chance):
    """The tasks on their devices, in the order in which a run by chance does them."""
    left, done, orders = sorted(every.orders[0]), set(), {}
    while left:
        ready = [
            task
            for task in left
            if all(any((kind, *where) in done for kind in kinds) for kinds, *where in awaited(every, task))
        ]
        task = chance.choice(ready)
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
