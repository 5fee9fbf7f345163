"""The latency-hiding order by hand, and as laws of random programs."""

import random

import pytest
from support.call_counts import num_calls

from sharding.cost.latency_hiding import Work, latency_hiding_order


def kernel(*after, us=10.0):
    return Work(microseconds=us, after=after)


def collective(*after, us=20.0):
    return Work(microseconds=us, after=after, is_collective=True)


def test_other_work_runs_while_a_collective_is_in_flight():
    x, other, before, reduced, end = kernel(), kernel(0, us=30), kernel(0), collective(2), kernel(1, 3)
    order = latency_hiding_order([x, other, before, reduced, end])
    assert order == [(0, "kernel"), (2, "kernel"), (3, "start"), (1, "kernel"), (3, "end"), (4, "kernel")]


def test_one_collective_is_in_flight_at_a_time():
    order = latency_hiding_order([kernel(), collective(0), collective(0), collective(0), kernel(1, 2, 3)])
    parts = [part for _, part in order]
    assert parts == ["kernel", *["start", "end"] * 3, "kernel"]


def test_a_loop_that_communicates_runs_while_no_collective_is_in_flight():
    loop = Work(microseconds=50.0, after=(0,), communicates=True)
    order = latency_hiding_order([kernel(), collective(0), loop, kernel(1, 2)])
    at = {entry: k for k, entry in enumerate(order)}
    assert not at[1, "start"] < at[2, "kernel"] < at[1, "end"]


def random_works(rng):
    works = [kernel()]
    for k in range(1, 60):
        after = tuple(rng.sample(range(k), min(k, rng.randint(1, 3))))
        make = rng.choice([kernel, kernel, kernel, collective])
        works.append(make(*after, us=rng.choice([0.0, 1.0, 8.0, 40.0])))
    return works


@pytest.mark.parametrize("seed", range(30))
def test_everything_runs_once_and_after_what_it_reads(seed):
    works = random_works(random.Random(seed))
    order = latency_hiding_order(works)
    expected = [(k, p) for k, w in enumerate(works) for p in (("start", "end") if w.is_collective else ("kernel",))]
    assert sorted(order) == sorted(expected)
    at = {entry: k for k, entry in enumerate(order)}
    for k, work in enumerate(works):
        first = at[k, "start" if work.is_collective else "kernel"]
        assert all(at[j, "end" if works[j].is_collective else "kernel"] < first for j in work.after)
        assert not work.is_collective or first < at[k, "end"]


@pytest.mark.parametrize("seed", range(10))
def test_collectives_do_not_overlap_one_another(seed):
    in_flight = 0
    for _, part in latency_hiding_order(random_works(random.Random(seed))):
        in_flight += {"start": 1, "end": -1, "kernel": 0}[part]
        assert in_flight in (0, 1)


def test_work_grows_with_the_number_of_ready_kernels():
    def calls(n):
        works = [kernel(us=1.0 + k % 7) for k in range(n)] + [collective(k) for k in range(n)]
        return num_calls(lambda: latency_hiding_order(works))

    assert calls(800) < 2.3 * calls(400)
