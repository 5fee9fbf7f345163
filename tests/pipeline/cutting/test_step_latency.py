"""DAPPLE's latency estimate against published numbers, policy B's schedules and its definition."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharding.errors import ShardingError
from sharding.pipeline import schedules
from sharding.pipeline.cutting import Phase, latency

FORWARDS = st.lists(st.integers(1, 9), min_size=1, max_size=5)


def simulated(forward, microbatches, policy="B"):
    schedule = schedules.dapple(stages=len(forward), microbatches=microbatches, policy=policy)
    return schedule.simulate(forward=forward, backward=[2 * time for time in forward])


def phases(forward):
    return [Phase(time, 2 * time) for time in forward]


@pytest.mark.parametrize(("stages", "microbatches", "total"), [(4, 8, 33), (4, 4, 21), (8, 32, 117), (1, 1, 3)])
def test_even_stages(stages, microbatches, total):
    found = latency([(1, 2)] * stages, microbatches=microbatches)
    assert found.total == total
    assert (found.pivot, found.warmup, found.steady) == (stages - 1, stages, 3 * (microbatches - 1))


@pytest.mark.parametrize(
    ("forward", "total", "pivot"),
    [([2, 2, 1, 2], 111, 3), ([2, 2, 3, 1], 156, 2), ([1, 3, 2, 3], 162, 3), ([3, 2, 2, 2], 144, 0)],
)
def test_uneven_stages(forward, total, pivot):
    found = latency(phases(forward), microbatches=16)
    assert (found.total, found.pivot) == (total, pivot)
    assert simulated(forward, 16).makespan == total


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=2, max_size=5))
def test_that_of_policy_b(forward):
    """Holds unless a stage is so much faster than its neighbours that its warm-up is too short."""
    assert latency(phases(forward), microbatches=16).total == simulated(forward, 16).makespan


@settings(max_examples=60, deadline=None)
@given(FORWARDS, st.integers(1, 12), st.sampled_from("AB"))
def test_never_above_a_schedule(forward, microbatches, policy):
    assert (
        latency(phases(forward), microbatches=microbatches).total <= simulated(forward, microbatches, policy).makespan
    )


def test_a_pivot_that_is_hardly_slower():
    """Comparing stages without the pivot's own microbatch would give stage 0 and 60, which no schedule attains."""
    found = latency(phases([5, 4]), microbatches=4)
    assert (found.pivot, found.total) == (1, 63)
    assert simulated([5, 4], 4).makespan == 63


def by_definition(stages, microbatches):
    """The maximum over all pivots and all stages that may finish last."""
    totals = []
    for pivot, end in itertools.product(range(len(stages)), repeat=2):
        backward = [stage[1] for stage in stages]
        steady = (microbatches - 1) * (stages[pivot][0] + stages[pivot][1])
        ending = stages[end][2] + sum(backward[end : pivot + 1]) - sum(backward[pivot + 1 : end + 1])
        totals.append(sum(stage[0] for stage in stages[: pivot + 1]) + steady + ending)
    return max(totals)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 99)), min_size=1, max_size=5),
    st.integers(1, 9),
)
def test_all_reduces_end_late(stages, microbatches):
    found = latency(stages, microbatches=microbatches)
    assert found.total == by_definition(stages, microbatches)
    assert found.steady == (microbatches - 1) * sum(stages[found.pivot][:2])


def test_an_all_reduce_behind_the_backwards_of_others():
    """The last stage's all-reduce overlaps the other backwards; the first stage's comes at the end."""
    hidden = latency([(1, 2), (1, 2), (1, 2, 4)], microbatches=4)
    late = latency([(1, 2, 4), (1, 2), (1, 2)], microbatches=4)
    assert (hidden.total, late.total) == (18, 22)


def test_transfers_are_stages():
    """A slow link is the pivot; a fast one adds its latency once each way, as in the schedule that overlaps it."""
    slow = latency([(1, 2), (5, 5), (1, 2)], microbatches=8)
    assert (slow.pivot, slow.total) == (1, 1 + 2 + 10 * 8)
    fast = latency([(1, 2), (0.5, 0.5), (1, 2)], microbatches=8)
    schedule = schedules.dapple(stages=2, microbatches=8, policy="B").simulate(send=0.5)
    assert fast.total == schedule.makespan == 28


def test_one_microbatch_goes_there_and_back():
    numbers = random.Random(0)
    times = [(numbers.randint(0, 9), numbers.randint(0, 9)) for _ in range(7)]
    assert latency(times, microbatches=1).total == sum(map(sum, times))


@pytest.mark.parametrize(
    ("stages", "microbatches", "words"), [([], 1, "no stages"), ([(1, 2)], 0, "microbatches=0"), ([(1, 2)], 2.0, "2.0")]
)
def test_what_has_no_latency(stages, microbatches, words):
    with pytest.raises(ShardingError, match=words):
        latency(stages, microbatches=microbatches)
