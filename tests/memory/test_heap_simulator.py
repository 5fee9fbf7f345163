"""Packed heaps against the peak of live bytes."""

import random

import pytest

from sharding.memory.heap_simulator import Occupancy, block_bytes


def most_at_once(intervals):
    return max(sum(n for n, a, b in intervals if a <= t <= b) for t in range(60))


def test_empty_heap():
    assert block_bytes([]) == 0


def test_disjoint_lifetimes_share_bytes():
    assert block_bytes([(64, 0, 1), (64, 2, 3), (64, 4, 5)]) == 64
    assert block_bytes([(64, 0, 2), (64, 2, 3)]) == 128


def test_a_gap_that_fits_is_taken():
    assert block_bytes([(128, 0, 9), (64, 0, 1), (128, 0, 9), (64, 3, 5)]) == 320


def test_fragmentation():
    # The two freed halves around a live buffer leave no contiguous room for a larger one.
    assert block_bytes([(64, 0, 1), (64, 0, 9), (64, 0, 1), (128, 2, 9)]) >= 192


def test_heap_is_between_the_peak_and_the_sum():
    for seed in range(50):
        rng = random.Random(seed)
        intervals = []
        for _ in range(rng.randint(1, 40)):
            first = rng.randrange(50)
            intervals.append((64 * rng.randint(1, 20), first, rng.randint(first, 55)))
        block = block_bytes(intervals)
        assert most_at_once(intervals) <= block <= sum(n for n, _, _ in intervals)
        assert block <= 2 * most_at_once(intervals)


@pytest.mark.parametrize("seed", range(20))
def test_occupancy_step_by_step(seed):
    rng = random.Random(seed)
    num_steps = rng.randint(1, 40)
    found, expected = Occupancy(num_steps), [set() for _ in range(num_steps)]
    for _ in range(60):
        first = rng.randrange(num_steps)
        last, buffer = rng.randrange(first, num_steps), rng.randrange(12)
        used = set().union(*expected[first : last + 1])
        assert found.used(first, last) == sum(1 << one for one in used)
        assert found.first_free(buffer, first, last) == next(k for k in range(buffer, 13) if k not in used)
        assert found.is_free(buffer, first, last) == (buffer not in used)
        if rng.random() < 0.4:
            found.add(buffer, first, last)
            for step in expected[first : last + 1]:
                step.add(buffer)
