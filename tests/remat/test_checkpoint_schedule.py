"""Schedules as data: counts, what makes them invalid, tables and charts."""

import re
from dataclasses import replace

import numpy as np
import pytest

import sharding
from sharding import remat
from sharding.remat import Advance, Backward, Free, Record, Restore, Snapshot
from sharding.remat.blocks import Block, actions, nested
from sharding.remat.replay import _few

TWO = [Snapshot(0), Advance(0, 1), Record(1), Backward(1), Restore(0), Backward(0), Free(0)]


def mine(given, steps=2):
    return remat.Schedule(name="mine", steps=steps, actions=given)


def test_counts():
    s = mine(TWO)
    assert (s.forwards, s.evaluations, s.snapshots) == (2, 3, 2)
    assert s.peak_bytes is None and s.cost is None


def without(action):
    return [one for one in TWO if one != action]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (without(Snapshot(0)), r"action 3, restore 0[\s\S]*state 0 on device"),
        (without(Advance(0, 1)), r"action 1, record 1[\s\S]*state 0 at hand[\s\S]*required: state 1 at hand"),
        (without(Backward(1)), r"action 4, backward 0[\s\S]*step 1 next"),
        (without(Restore(0)), r"action 4, backward 0[\s\S]*no state at hand"),
        (without(Backward(0)), r"end of the schedule[\s\S]*add backward 0"),
        (without(Free(0)), r"end of the schedule[\s\S]*stored 0"),
        ([Advance(0, 3)], r"action 0, advance 0-3[\s\S]*<= 2"),
        ([Advance(1, 2)], r"action 0, advance 1-2[\s\S]*state 0 at hand"),
        ([Snapshot(0), Snapshot(0)], r"action 1, snapshot 0[\s\S]*not yet stored"),
        ([Free(0)], r"action 0, free 0[\s\S]*stored none"),
        ([Snapshot(0, "host"), Restore(0)], r"action 1, restore 0[\s\S]*on device"),
    ],
)
def test_invalid_schedules(given, message):
    with pytest.raises(sharding.ShardingError, match=message):
        mine(given).check()


@pytest.mark.parametrize("steps", [0, -1, 1.5])
def test_invalid_steps(steps):
    with pytest.raises(sharding.ShardingError, match=r"mine\): steps"):
        mine([], steps)


def test_bytes_and_costs_of_a_chain():
    chain = remat.Chain(state_bytes=(1, 10, 100), record_bytes=(20, 200), forward_costs=(2, 3), backward_costs=(5, 7))
    s = replace(mine(TWO), chain=chain)
    # During backward 1: state 0, record 1 with its input, state 1, and the gradients of states 2 and 1.
    assert s.peak_bytes == 1 + (200 + 10) + 100 + 10
    assert s.cost == 2 + 3 + 7 + (2 + 5)
    assert "peak 321 bytes" in s.title


@pytest.mark.parametrize(
    ("field", "values", "message"),
    [("record_bytes", (1,), "2 values"), ("forward_costs", (1, -1), r"\[1\] = -1"), ("state_bytes", (1,), "each step")],
)
def test_invalid_chains(field, values, message):
    given = {"state_bytes": (1, 2, 3)} | {field: values}
    with pytest.raises(sharding.ShardingError, match=rf"remat\.Chain\({field}\)[\s\S]*{message}"):
        remat.Chain(**given)


def test_table_and_long_schedules():
    s = remat.revolve(200, snapshots=5)
    assert repr(s).splitlines()[0] == "revolve: 200 steps, 790 forwards, 5 snapshots"
    assert repr(s).splitlines()[-1].strip() == f"and {len(s.actions) - 40:,} more: .actions"
    assert s.rows()[0] == (0, "snapshot 0", 1)
    assert "and" in s._repr_html_() and "<table" in s._repr_html_()


@pytest.mark.parametrize("s", [remat.revolve(6, 2), remat.sqrt(9), remat.sqrt(1), remat.revolve(3000, 5)], ids=str)
def test_chart_shows_every_state_that_is_held(s, tmp_path):
    svg = s.plot().svg
    assert s.title in svg
    if s.steps < 10:
        held = re.findall(r"<title>held state (\d+), from", svg)
        assert sorted(map(int, held)) == sorted(a.state for a in s.actions if isinstance(a, Snapshot))
        assert len(re.findall(r"<title>backward ", svg)) == s.steps
    rows = [(int(n), float(y)) for y, n in re.findall(r'y="([\d.]+)">state (\d+)<', svg)]
    bars = re.findall(r'<rect [^>]*?y="([-\d.]+)"[^>]*><title>(?:held state|backward) (\d+),', svg)
    beside = dict(rows)
    of_bars = [beside[int(row)] - float(y) for y, row in bars if int(row) in beside]
    assert of_bars and max(of_bars) - min(of_bars) < 0.3 and 0 < min(of_bars) < 20  # each label is at its row
    labels = [number for number, _ in rows]
    step = labels[1] - labels[0]
    assert labels == [*range(0, s.steps + 1, step)]  # all rows, or as many as there is room for
    assert step == 1 or s.steps > 40
    apart = np.diff([y for _, y in rows])
    assert apart == pytest.approx(apart.mean(), abs=0.2) and apart.min() > 10
    across, down = map(float, re.search(r'<svg [^>]*?width="(\d+)" height="(\d+)"', svg).groups())
    bar = r'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)"[^>]*><title>'
    ends = [(float(x) + float(w), float(y) + float(h)) for x, y, w, h in re.findall(bar, svg)]
    (legend,) = {float(y) for y in re.findall(r'y="([\d.]+)"[^>]*>(?:held state|record|backward|forward)<', svg)}
    assert max(x for x, _ in ends) <= across and max(y for _, y in ends) <= legend < down
    s.plot().save(tmp_path / "chart.svg")
    assert (tmp_path / "chart.svg").read_text() == svg


@pytest.mark.parametrize("s", [remat.revolve(30, 3), remat.revolve(9, 1), remat.sqrt(20), remat.chen([3, 1, 2, 9])])
def test_nested_blocks(s):
    """A step runs forward once for itself and once for each block around it."""

    def runs(block, depth=0):
        return sum(runs(part, depth + 1) if isinstance(part, Block) else depth + 1 for part in block.parts)

    assert runs(nested(s.name, s.steps, s.actions)) == s.evaluations


def test_blocks_give_their_actions():
    inner = Block(1, 4, [Block(1, 3, [1, 2]), 3])
    whole = Block(0, 6, [0, inner, 4, 5])
    s = mine(list(actions(whole)), steps=6)
    s.check()
    assert nested("mine", 6, s.actions) == whole
    assert s.forwards == 6 + 3 + 2


def test_dropped_states_have_no_blocks():
    given = [Snapshot(0), Advance(0, 1), Snapshot(1), Advance(1, 2), Backward(2)]
    given += [Restore(0), Advance(0, 1), Backward(1), Free(1), Restore(0), Backward(0), Free(0)]
    mine(given, steps=3).check()
    with pytest.raises(sharding.ShardingError, match=r"action 5, restore 0[\s\S]*remat\.revolve"):
        nested("mine", 3, given)


@pytest.mark.parametrize("number", range(13))
def test_numbers_in_an_error_are_all_counted(number):
    """Named or counted, whatever their order."""
    text = _few({number - k: None for k in range(number)}.keys())
    named, _, more = text.partition(" and ")
    listed = [] if named == "none" else [*map(int, named.split(", "))]
    assert listed == [*range(1, number + 1)][: len(listed)]
    assert len(listed) + int(more.split()[0] if more else 0) == number
