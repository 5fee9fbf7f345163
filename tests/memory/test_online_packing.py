"""Heaps that are packed in the order of the schedule, as XLA:TPU does, against a slow reference and the compiler."""

import random

import pytest
from support import compilers
from support.peak_memory import compiled_temporary_bytes, floats, temporary_bytes

from sharding.memory.heap_simulator import Interval, block_bytes, online_bytes


def packed_byte_by_byte(intervals: list[Interval]) -> int:
    """The heap's size: at its start each buffer takes the smallest run of free bytes, or the last one, which grows."""
    heap: list[int] = []
    """Per byte, when it is free again."""
    for size, first, last in sorted(intervals, key=lambda one: one[1]):
        runs, begin = [], 0
        for at in range(len(heap) + 1):
            if at == len(heap) or heap[at] >= first:
                runs.append((at - begin, begin))
                begin = at + 1
        fitting = [run for run in runs if run[0] >= size]
        begin = min(fitting)[1] if fitting else runs[-1][1]
        heap += [-1] * (begin + size - len(heap))
        heap[begin : begin + size] = [last] * size
    return len(heap)


def test_packing_byte_by_byte():
    for seed in range(300):
        generator = random.Random(seed)
        intervals = []
        for _ in range(generator.randrange(16)):
            first, last = sorted(generator.choices(range(12), k=2))
            intervals.append((generator.randrange(1, 7), first, last))
        found = online_bytes(intervals)
        assert found == packed_byte_by_byte(intervals), intervals
        assert found >= max((sum(n for n, a, b in intervals if a <= t <= b) for t in range(12)), default=0)


def test_a_gap_is_too_small_for_what_comes_later():
    """Each is made from the one before; the last doesn't fit in front of the second."""
    intervals = [(1, 0, 1), (1, 1, 2), (2, 2, 3)]
    assert (online_bytes(intervals), block_bytes(intervals)) == (4, 3)


def test_the_last_gap_grows():
    assert online_bytes([(4, 0, 9), (2, 1, 2), (3, 3, 4)]) == 7


ROWS, SIZE = 65536, 1024
ARRAY = 2 * ROWS * SIZE
"""Bytes of a product of float32 arrays that only another product reads, in bfloat16."""
SQUARE, DOUBLE, HALF = floats(SIZE, SIZE), floats(SIZE, 2 * SIZE), floats(2 * SIZE, SIZE)
PROGRAMS = {
    "a larger one last": (lambda x, a, b, c, d: x @ a @ b @ c @ d, (SQUARE, SQUARE, DOUBLE, floats(2 * SIZE, 8)), 4),
    "a larger one first": (lambda x, a, b, c, d: x @ a @ b @ c @ d, (DOUBLE, HALF, SQUARE, floats(SIZE, 8)), 3),
    "with one that is kept": (
        lambda x, a, b, c, d: (lambda y: y @ b @ c @ d + y[:, :8])(x @ a),
        (SQUARE, SQUARE, DOUBLE, floats(2 * SIZE, 8)),
        5,
    ),
}
"""A chain of products, its weights, and the heap in arrays."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_heaps_of_products(name):
    f, weights, count = PROGRAMS[name]
    args = (floats(ROWS, SIZE), *weights)
    assert temporary_bytes(f, args, "tpu") == pytest.approx(count * ARRAY, rel=0.01)


@pytest.mark.slow
@compilers.needs("libtpu")
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_compiler_for_tpus_packs_so(name):
    f, weights, count = PROGRAMS[name]
    args = (floats(ROWS, SIZE), *weights)
    assert compiled_temporary_bytes(f, args, "v5p:2x2x2") == pytest.approx(count * ARRAY, rel=0.01)
