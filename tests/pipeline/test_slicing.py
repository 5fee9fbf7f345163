"""Where sequences are cut, against all ways to cut them."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharding.errors import ShardingError
from sharding.pipeline import schedules, token_slices


def toy(length, context):
    return 1 + 0.1 * length + 0.002 * length * (context + length / 2)


def times(lengths, duration):
    return [duration(length, sum(lengths[:i])) for i, length in enumerate(lengths)]


def best_of_all(tokens, stages, duration):
    totals = []
    for cuts in itertools.product((False, True), repeat=tokens - 1):
        ends = [i + 1 for i, cut in enumerate(cuts) if cut] + [tokens]
        taken = times([end - begin for begin, end in zip([0, *ends], ends, strict=False)], duration)
        totals.append(sum(taken) + (stages - 1) * max(taken))
    return min(totals)


@pytest.mark.parametrize(
    ("tokens", "stages", "lengths", "makespan"),
    [(12, 4, (6, 6), 8.468), (14, 8, (5, 5, 4), 15.621), (14, 2, (14,), 5.192)],
)
def test_published_instances(tokens, stages, lengths, makespan):
    found = token_slices(tokens=tokens, stages=stages, duration=toy)
    assert found.lengths == lengths
    assert found.makespan == pytest.approx(makespan, abs=5e-4)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 10), st.integers(1, 6), st.integers(0, 3), st.integers(0, 3), st.integers(0, 3))
def test_least_of_all_ways(tokens, stages, start, each, context):
    def duration(length, before):
        return start + each * length + context * length * before / 4 + 0.01

    found = token_slices(tokens=tokens, stages=stages, duration=duration)
    assert sum(found.lengths) == tokens
    assert found.makespan == pytest.approx(best_of_all(tokens, stages, duration))


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_the_schedule_takes_what_was_found(stages):
    found = token_slices(tokens=14, stages=stages, duration=toy)
    taken = times(found.lengths, toy)
    schedule = schedules.terapipe(stages=stages, microbatches=1, slices=len(taken))
    part = schedule.simulate(forward=lambda t: taken[t.slice] / 3, backward=lambda t: taken[t.slice] * 2 / 3)
    assert part.makespan == pytest.approx(found.makespan)
    assert list(found.lengths) == sorted(found.lengths, reverse=True)


def test_one_stage_needs_no_slices():
    assert token_slices(tokens=14, stages=1, duration=toy).lengths == (14,)


def test_units_and_tolerance():
    fine = token_slices(tokens=48, stages=4, duration=toy)
    coarse = token_slices(tokens=48, stages=4, duration=toy, unit=8)
    assert all(length % 8 == 0 for length in coarse.lengths)
    assert fine.makespan <= coarse.makespan
    near = token_slices(tokens=48, stages=4, duration=toy, tolerance=0.2)
    assert fine.makespan <= near.makespan <= fine.makespan + 3 * 0.2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tokens": 0, "stages": 2}, "tokens=0"),
        ({"tokens": 4, "stages": 0}, "stages=0"),
        ({"tokens": 10, "stages": 2, "unit": 4}, r"10 % 4 = 2[\s\S]*multiple of unit"),
    ],
)
def test_sizes_that_cannot_be(arguments, words):
    with pytest.raises(ShardingError, match=words):
        token_slices(duration=toy, **arguments)
