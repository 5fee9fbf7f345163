"""Packed heaps against the peak of live bytes."""

import random

from sharding.memory.heap_simulator import block_bytes


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
