"""Blocks of memory against what is there at once."""

import random

from sharding.memory.packing import block_bytes


def most_at_once(intervals):
    return max(sum(n for n, a, b in intervals if a <= t <= b) for t in range(60))


def test_empty_block():
    assert block_bytes([]) == 0


def test_arrays_of_different_times_share_bytes():
    assert block_bytes([(64, 0, 1), (64, 2, 3), (64, 4, 5)]) == 64
    assert block_bytes([(64, 0, 2), (64, 2, 3)]) == 128


def test_a_gap_that_fits_is_taken():
    assert block_bytes([(128, 0, 9), (64, 0, 1), (128, 0, 9), (64, 3, 5)]) == 320


def test_what_is_left_free_need_not_fit():
    # Two halves that lie around one that stays leave no room for a whole in one piece.
    assert block_bytes([(64, 0, 1), (64, 0, 9), (64, 0, 1), (128, 2, 9)]) >= 192


def test_block_is_between_what_is_there_at_once_and_the_sum():
    for seed in range(50):
        rng = random.Random(seed)
        intervals = []
        for _ in range(rng.randint(1, 40)):
            first = rng.randrange(50)
            intervals.append((64 * rng.randint(1, 20), first, rng.randint(first, 55)))
        block = block_bytes(intervals)
        assert most_at_once(intervals) <= block <= sum(n for n, _, _ in intervals)
        assert block <= 2 * most_at_once(intervals)
