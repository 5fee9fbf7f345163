"""The simulator against a slow reference that checks every stream at every event, and against a published instance."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharding.cost import Task, simulate
from sharding.errors import ShardingError


def clock(tasks):
    """(start, end) of each task: whenever a task ends, idle streams start the first task in their queue."""
    order, place = [], {}
    while len(order) < len(tasks):  # topological order, ties broken by the order given
        order.append(next(t for t in tasks if t.name not in place and all(name in place for name in t.after)))
        place[order[-1].name] = len(place)
    spans, now = {}, 0.0

    def done(name):
        return name in spans and spans[name][1] <= now

    while len(spans) < len(tasks):
        begun = True
        while begun:  # a zero-length task ends at once and may let others start at the same time
            begun = False
            lines = {}
            for t in order:
                if t.name not in spans and all(map(done, t.after)):
                    ready = max((spans[name][1] for name in t.after), default=0.0)
                    lines.setdefault(t.stream, []).append((ready, place[t.name], t))
            free = {
                s
                for s in lines
                if all(e <= now for t in tasks if t.stream == s for e in [spans.get(t.name, (0, 0))[1]])
            }
            first = min((min(lines[s])[:2] for s in free), default=None)
            for s in free:
                ready, number, t = min(lines[s])
                if (ready, number) == first:
                    spans[t.name] = (now, now + t.seconds)
                    begun = True
        now = min((end for _, end in spans.values() if end > now), default=now)
    return spans


def times(timeline):
    return {name: (span.start_seconds, span.end_seconds) for name, span in timeline.spans.items()}


@st.composite
def programs(draw):
    """Tasks in any order with few streams and durations, so that there are ties and queues."""
    count = draw(st.integers(1, 12))
    seconds = st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 0.1, 0.3])
    tasks = []
    for number in range(count):
        after = draw(st.sets(st.sampled_from(range(number)), max_size=3)) if number else set()
        stream = draw(st.sampled_from("abc"))
        tasks.append(
            Task(name=f"t{number}", stream=stream, seconds=draw(seconds), after=tuple(f"t{i}" for i in sorted(after)))
        )
    changes = draw(st.lists(st.dictionaries(st.sampled_from([t.name for t in tasks]), seconds, max_size=3), max_size=5))
    return draw(st.permutations(tasks)), changes


@settings(derandomize=True, deadline=None, max_examples=200)
@given(programs())
def test_full_and_delta_algorithms_agree_with_the_reference(program):
    tasks, changes = program
    timeline = simulate(tasks)
    assert times(timeline) == clock(tasks)
    for change in changes:
        tasks = [
            Task(name=t.name, stream=t.stream, seconds=change.get(t.name, t.seconds), after=t.after) for t in tasks
        ]
        before, timeline = times(timeline), timeline.with_seconds(change)
        again = simulate(tasks)
        assert times(timeline) == times(again) == clock(tasks)
        assert timeline.streams == again.streams
        assert timeline.makespan_seconds == again.makespan_seconds
        assert before is not None


@settings(derandomize=True, deadline=None, max_examples=100)
@given(programs())
def test_bounds(program):
    timeline = simulate(program[0])
    longest = {}
    for name in timeline.spans:
        task = next(t for t in program[0] if t.name == name)
        longest[name] = task.seconds + max((longest[other] for other in task.after), default=0.0)
    assert timeline.makespan_seconds >= max(longest.values()) - 1e-9
    for stream in timeline.streams:
        assert timeline.busy_seconds(stream) <= timeline.makespan_seconds + 1e-9
        assert math.isclose(
            timeline.busy_seconds(stream) + timeline.idle_seconds(stream), timeline.makespan_seconds, abs_tol=1e-9
        )


@settings(derandomize=True, deadline=None, max_examples=100)
@given(programs())
def test_critical_path_has_no_gap(program):
    timeline = simulate(program[0])
    path = [timeline[name] for name in timeline.critical_path()]
    (first,) = (task for task in program[0] if task.name == timeline.critical_path()[0])
    assert path[0].start_seconds == 0.0 and not first.after
    assert path[-1].end_seconds == timeline.makespan_seconds
    for one, following in zip(path[:-1], path[1:], strict=True):
        assert one.end_seconds == following.start_seconds


def parts(op, devices, seconds, reads=()):
    """The tasks of an op, one per device, that reads other ops' results: a transfer of 0.5 from each other device."""
    tasks = []
    for i, device in enumerate(devices):
        after = []
        for source, homes in reads:
            for j, home in enumerate(homes):
                if home == device:
                    after.append(f"{source}{j}")
                    continue
                after.append(f"{source}{j} to {op}{i}")
                tasks.append(Task(name=after[-1], stream=f"{home}->{device}", seconds=0.5, after=(f"{source}{j}",)))
        tasks.append(Task(name=f"{op}{i}", stream=f"device {device}", seconds=seconds, after=tuple(after)))
    return tasks


@pytest.mark.parametrize(
    ("a", "b", "c", "makespan_seconds"),
    [([0, 1], [0, 1], [0], 7.0), ([0, 1], [0, 1], [1], 7.0), ([0], [0, 1], [0], 8.0), ([0, 0], [0, 0], [0], 9.0)],
)
def test_three_ops_on_two_devices(a, b, c, makespan_seconds):
    tasks = parts("A", a, 2 / len(a)) + parts("B", b, 2, [("A", a)]) + parts("C", c, 3, [("B", b)])
    assert simulate(tasks).makespan_seconds == makespan_seconds


def test_the_trace_of_three_ops():
    tasks = parts("A", [0, 1], 1) + parts("B", [0, 1], 2, [("A", [0, 1])]) + parts("C", [0], 3, [("B", [0, 1])])
    timeline = simulate(tasks)
    assert times(timeline) == {
        "A0": (0, 1),
        "A1": (0, 1),
        "A1 to B0": (1, 1.5),
        "A0 to B1": (1, 1.5),
        "B0": (1.5, 3.5),
        "B1": (1.5, 3.5),
        "B1 to C0": (3.5, 4),
        "C0": (4, 7),
    }
    assert timeline.critical_path() == ("A0", "A0 to B1", "B1", "B1 to C0", "C0")
    assert timeline.busy_seconds("device 0") == 6
    assert timeline.idle_seconds("device 1") == 4


def test_communication_hides_behind_compute():
    step = [
        Task(name="g2", stream="compute", seconds=2),
        Task(name="reduce g2", stream="link", seconds=1.5, after=("g2",)),
        Task(name="g1", stream="compute", seconds=2, after=("g2",)),
        Task(name="reduce g1", stream="link", seconds=1.5, after=("g1",)),
    ]
    timeline = simulate(step)
    assert timeline.makespan_seconds == 5.5
    assert timeline.with_seconds({"reduce g2": 3}).makespan_seconds == 6.5


def test_a_change_retimes_only_affected_tasks():
    chains = [
        Task(name=f"{chain}{i}", stream=f"s{chain}", seconds=1, after=(f"{chain}{i - 1}",) if i else ())
        for chain in range(10)
        for i in range(100)
    ]
    timeline = simulate(chains)
    assert timeline.num_timed == 1000
    changed = timeline.with_seconds({"390": 3.0})
    assert changed["399"].end_seconds == 102
    assert 10 <= changed.num_timed < 30
    assert timeline["399"].end_seconds == 100


def test_no_tasks():
    assert simulate([]).makespan_seconds == 0
    assert simulate([]).critical_path() == ()


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ([Task(name="a", stream="s", seconds=1)] * 2, "duplicate task 'a'"),
        ([Task(name="a", stream="s", seconds=1, after=("b",))], "'a' after unknown task 'b'"),
        ([Task(name="a", stream="s", seconds=-1)], "'a' of -1 seconds"),
        (
            [Task(name="a", stream="s", seconds=1, after=("b",)), Task(name="b", stream="s", seconds=1, after=("a",))],
            "cyclic dependencies: a, b",
        ),
    ],
)
def test_errors(tasks, message):
    with pytest.raises(ShardingError, match=message):
        simulate(tasks)


def test_errors_of_changes():
    with pytest.raises(ShardingError, match=r"unknown task 'b'(.|\n)*'a' of nan seconds"):
        simulate([Task(name="a", stream="s", seconds=1)]).with_seconds({"b": 1, "a": math.nan})
