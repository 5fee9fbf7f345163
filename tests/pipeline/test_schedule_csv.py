"""CSV files: exact round trips, and errors with their line."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.all_schedules import GRID, cases_by_schedule, make_schedule, random_schedules

from sharding.errors import ShardingError
from sharding.pipeline import Schedule, Task, schedules

HEAD = "device,kind,stage,microbatch\n"


@pytest.mark.parametrize(*cases_by_schedule(GRID))
def test_round_trip(cases, tmp_path):
    for case in cases:
        schedule = make_schedule(*case)
        schedule.to_csv(tmp_path / "s.csv")
        found = Schedule.from_csv(tmp_path / "s.csv")
        assert found == schedule
        found.to_csv(tmp_path / "again.csv")
        assert (tmp_path / "again.csv").read_bytes() == (tmp_path / "s.csv").read_bytes()


@settings(max_examples=40, deadline=None)
@given(random_schedules(), st.text())
def test_any_table_and_name(tmp_path_factory, schedule, name):
    path = tmp_path_factory.mktemp("csv") / "s.csv"
    given = Schedule(
        name=name,
        orders=schedule.orders,
        stages=schedule.stages,
        microbatches=schedule.microbatches,
        slices=schedule.slices,
        chunks=3,
        microbatches_per_update=schedule.microbatches_per_update,
    )
    given.to_csv(path)
    assert Schedule.from_csv(path) == given


def read(tmp_path, text):
    path = tmp_path / "mine.csv"
    path.write_text(text, encoding="utf-8")
    return Schedule.from_csv(path)


def test_a_table_by_hand(tmp_path):
    """Columns in any order, blanks, comments and a byte order mark; sizes are inferred."""
    text = "\ufeff# one device\nkind, microbatch, stage, device\n\nforward,0,0,0\n# then\n backward , 0,0,0\n"
    schedule = read(tmp_path, text)
    assert schedule.orders == ((Task("forward", 0, 0), Task("backward", 0, 0)),)
    assert (schedule.name, schedule.stages, schedule.microbatches, schedule.chunks) == ("mine", 1, 1, 1)
    schedule.check()


def test_header_by_hand(tmp_path):
    text = '# {"chunks":2,"microbatches_per_update":1}\n' + HEAD + "0,forward,0,0\n0,forward,0,1\n"
    schedule = read(tmp_path, text)
    assert (schedule.chunks, schedule.microbatches_per_update, schedule.microbatches) == (2, 1, 2)


def test_lines_of_devices_may_be_mixed(tmp_path):
    rows = [f"{one.device},{one.task.kind},{one.task.stage},{one.task.microbatch}" for one in mixed()]
    assert read(tmp_path, HEAD + "\n".join(rows)).orders == schedules.one_f_one_b(stages=3, microbatches=4).orders


def mixed():
    """The tasks position by position, not device by device."""
    return sorted(
        schedules.one_f_one_b(stages=3, microbatches=4).located(), key=lambda one: (one.position, -one.device)
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", r"mine.csv[\s\S]*no tasks[\s\S]*device,kind,stage,microbatch,slice,version"),
        (HEAD, "no tasks"),
        ("device,kind,stage,microbatch,colour\n0,forward,0,0,red\n", r"line 1\n  found:    unknown column 'colour'"),
        ("device,kind,stage\n0,forward,0\n", "no column 'microbatch'"),
        ("device,kind,stage,microbatch,stage\n0,forward,0,0,0\n", "column 'stage' twice"),
        (HEAD + "0,sideways,0,0\n", r"line 2\n  found:    kind 'sideways'\n  required: one of forward, backward, b"),
        (HEAD + "0,forward,0,-1\n", r"line 2\n  found:    microbatch '-1'\n  required: a non-negative integer"),
        (HEAD + "zero,forward,0,0\n", "device 'zero'"),
        (HEAD + "0,forward,0,1.0\n", "microbatch '1.0'"),
        (HEAD + "0,forward,0,\n", "microbatch ''"),
        (HEAD + "0,forward,0\n", "3 cells for 4 columns"),
        (HEAD + "0,left,0,0\n0,right,0,0\n", r"2 failures[\s\S]*kind 'left'[\s\S]*kind 'right'"),
        (HEAD + "0,forward,0,0\n999999999999,backward,0,0\n", "tasks on device 999999999999 and none on device 1"),
        ('# {"stage": 4}\n' + HEAD + "0,forward,0,0\n", r"line 1\n  found:    unknown: stage\n  required: JSON with"),
        ('# {"stages": 4\n' + HEAD + "0,forward,0,0\n", r"line 1\n  found:    # {\"stages\": 4"),
        ('# {"stages": 0}\n' + HEAD + "0,forward,0,0\n", "stages=0"),
        ('# {"chunks": "2"}\n' + HEAD + "0,forward,0,0\n", "chunks='2'"),
        ('# {"name": 2}\n' + HEAD + "0,forward,0,0\n", "name 2"),
    ],
)
def test_what_is_refused(text, words, tmp_path):
    with pytest.raises(ShardingError, match=words):
        read(tmp_path, text)
