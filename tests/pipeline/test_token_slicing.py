"""Token slices of sequences and batches against exhaustive search."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharding.errors import ShardingError
from sharding.pipeline import joint_slices, schedules, sliced, token_slices


def toy(length, context):
    return 1 + 0.1 * length + 0.002 * length * (context + length / 2)


def times(lengths, duration):
    return [duration(length, sum(lengths[:i])) for i, length in enumerate(lengths)]


def ways(whole):
    """All compositions of an integer."""
    for cuts in itertools.product((False, True), repeat=whole - 1):
        ends = [i + 1 for i, cut in enumerate(cuts) if cut] + [whole]
        yield [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


def makespan(taken, stages):
    return sum(taken) + (stages - 1) * max(taken)


def best_of_all(tokens, stages, duration):
    return min(makespan(times(lengths, duration), stages) for lengths in ways(tokens))


def best_of_all_batches(batch, tokens, stages, duration):
    """Exhaustive search over microbatches of the batch and slices of each one's tokens."""
    totals = []
    for sizes in ways(batch):
        for cuts in itertools.product(list(ways(tokens)), repeat=len(sizes)):
            parts = zip(sizes, cuts, strict=True)
            taken = [t for size, lengths in parts for t in times(lengths, lambda *at, size=size: duration(size, *at))]
            totals.append(makespan(taken, stages))
    return min(totals)


def best_of_equal_batches(batch, tokens, stages, duration):
    totals = []
    for size in (size for size in range(1, batch + 1) if batch % size == 0):
        for lengths in ways(tokens):
            taken = times(lengths, lambda *at, size=size: duration(size, *at)) * (batch // size)
            totals.append(makespan(taken, stages))
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


COSTS = st.tuples(st.integers(1, 6), st.integers(0, 3), st.integers(0, 3), st.integers(0, 3), st.integers(0, 2))


def cost(start, each, context, size_each):
    def duration(size, length, before):
        return 0.01 + start + (each * length + context * length * before / 4) * (1 + size_each * (size - 1) / 2)

    return duration


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3), st.integers(1, 4), COSTS)
def test_least_of_all_ways_to_cut_a_batch(batch, tokens, numbers):
    stages, *costs = numbers
    duration = cost(*costs)
    found = joint_slices(batch=batch, tokens=tokens, stages=stages, duration=duration)
    assert sum(size for size, _ in found.microbatches) == batch
    assert all(sum(lengths) == tokens for _, lengths in found.microbatches)
    assert found.makespan == pytest.approx(best_of_all_batches(batch, tokens, stages, duration))


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([1, 2, 3, 4, 6, 8]), st.integers(1, 8), COSTS)
def test_least_of_equal_microbatches(batch, tokens, numbers):
    stages, *costs = numbers
    duration = cost(*costs)
    found = joint_slices(batch=batch, tokens=tokens, stages=stages, duration=duration, equal=True)
    assert len(set(found.microbatches)) == 1
    assert found.makespan == pytest.approx(best_of_equal_batches(batch, tokens, stages, duration))


def test_the_schedule_takes_what_was_found_for_a_batch():
    def duration(size, length, before):
        return toy(length, before) * (1 + 0.3 * (size - 1))

    found = joint_slices(batch=6, tokens=14, stages=8, duration=duration, equal=True)
    size, lengths = found.microbatches[0]
    assert 1 < len(found.microbatches) < 6
    assert len(lengths) > 1
    taken = times(lengths, lambda *at: duration(size, *at))
    schedule = schedules.terapipe(stages=8, microbatches=len(found.microbatches), slices=len(lengths))
    whole = schedule.simulate(forward=lambda t: taken[t.slice] / 3, backward=lambda t: taken[t.slice] * 2 / 3)
    assert whole.makespan == pytest.approx(found.makespan)


def test_slices_of_tokens_and_where_they_begin():
    tokens = np.arange(2 * 3 * 5).reshape(2, 3, 5)
    first, second = sliced(tokens, (3, 2))
    np.testing.assert_array_equal(first[0], tokens[..., :3])
    np.testing.assert_array_equal(second[0], tokens[..., 3:])
    assert first[1].tolist() == [0, 0]
    assert second[1].tolist() == [3, 3]
    for lengths in ((3, 1), (5, 0), ()):
        with pytest.raises(ShardingError, match="add up to the tokens"):
            sliced(tokens, lengths)


def test_one_stage_needs_no_slices():
    assert token_slices(tokens=14, stages=1, duration=toy).lengths == (14,)


@pytest.mark.parametrize(("tokens", "unit"), [(5, 1), (12, 3), (8, 8)])
def test_times_are_asked_once_for_each_slice_of_whole_units(tokens, unit):
    """Measured times are not asked for what is no part of a sequence."""
    asked, jointly = [], []
    token_slices(tokens=tokens, stages=2, unit=unit, duration=lambda *at: asked.append(at) or toy(*at))
    joint_slices(
        batch=4, tokens=tokens, stages=2, unit=unit, equal=True, duration=lambda *at: jointly.append(at) or toy(*at[1:])
    )
    ends = range(unit, tokens + 1, unit)
    slices = [(length, end - length) for end in ends for length in range(unit, end + 1, unit)]
    assert sorted(asked) == sorted(slices)
    assert sorted(jointly) == sorted((size, *one) for size in (1, 2, 4) for one in slices)


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
    with pytest.raises(ShardingError, match="joint_slices"):
        joint_slices(batch=2, duration=lambda size, *at: toy(*at), **arguments)
