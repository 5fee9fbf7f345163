"""The latency-hiding order by hand, and as laws of random programs."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
from support.call_counts import num_calls

from sharding.cost.gpu_latencies import START_US
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


# The policy once more, over plain lists


def slow_nodes(works):
    """The starts, ends and kernels, each with what it waits for and what waits for it."""
    nodes, ends = [], []
    for k, work in enumerate(works):
        parts = ("start", "end") if work.is_collective else ("kernel",)
        made = [SimpleNamespace(part=p, k=k, work=work, after=[], before=[], placed=False, ready=0.0) for p in parts]
        if work.is_collective:
            made[0].before.append((made[1], work.microseconds))
            made[1].after.append(made[0])
        for j in work.after:
            ends[j].before.append((made[0], START_US))
            made[0].after.append(ends[j])
        for node in made:
            node.lasts = work.microseconds if node.part == "kernel" else START_US
            own = work.microseconds if node.part == "end" else 0
            node.depth = own + max((one.depth for one in node.after), default=0)
            node.is_end = node.part == "end" or work.communicates
        nodes += made
        ends.append(made[-1])
    return nodes


def slow_order(works):
    """From the end: each turn looks at all nodes, and takes the best of those whose readers are all placed."""
    nodes, order, now, in_flight, released, waits = slow_nodes(works), [], 0.0, False, [], []

    def left(node):
        return sum(not reader.placed for reader, _ in node.before)

    def release(node):
        node.ready = max(now, earliest(node))
        released.append(node)
        if node.ready > now and not node.work.is_view:
            waits.append(node.ready)

    def earliest(node):
        return max([0.0, *(behind(reader, node) + wait for reader, wait in node.before)])

    def behind(reader, node):
        return max(reader.done, reader.ready + START_US) if node.k in reader.work.views else reader.ready

    def liked(node):
        waits_alone = sum(left(one) == 1 for one in node.after)
        return any(one.part == "end" for one in node.after), waits_alone, node.k

    def stall(node):
        return max(node.ready - now, 0)

    def misfit(node):
        return abs(min(waits) - now - node.lasts) if waits else 0

    def best(found):
        """The one that waits least, then behind most latency, then that fills the time, then that is liked most."""
        found = [node for node in found if stall(node) == min(map(stall, found))]
        return max(found, key=lambda node: (node.depth, -misfit(node), liked(node)))

    def choice():
        waiting = [node for node in released if not node.placed]
        views = [node for node in waiting if node.work.is_view]
        if views:
            return views[-1]
        ends = [node for node in waiting if node.is_end]
        starts = [node for node in waiting if node.part == "start"]
        others = [node for node in waiting if not node.is_end and node.part != "start"]
        for first in ([node for node in others if node.work.is_filled_late], [] if in_flight else ends):
            if first:
                return best(first)
        if not starts or not others:
            return best(starts or others)
        (start,), kernel = starts, best(others)
        if stall(start) != stall(kernel):
            return min(start, kernel, key=stall)
        if ends or not start.depth:
            return start if ends else kernel
        if start.depth != kernel.depth:
            return max(start, kernel, key=lambda node: node.depth)
        return kernel if misfit(kernel) < misfit(start) or liked(kernel) > liked(start) else start

    for node in nodes:
        if not node.before:
            release(node)
    while len(order) < len(nodes):
        node = choice()
        node.ready = max(now, earliest(node))
        node.done = now = node.ready + node.lasts
        waits[:] = [time for time in waits if time >= now]
        in_flight = node.part == "end" if node.part != "kernel" else in_flight
        node.placed = True
        order.append((node.k, node.part))
        for source in node.after:
            if not left(source) and source not in released:
                release(source)
    return order[::-1]


@pytest.mark.parametrize("seed", range(60))
def test_the_order_is_that_of_the_policy(seed):
    rng = random.Random(seed)
    works = [
        replace(
            one,
            views=frozenset(k for k in one.after if rng.random() < 0.3),
            communicates=(kind := rng.random()) < 0.2 and not one.is_collective and seed % 2 == 1,
            is_view=0.2 <= kind < 0.4 and not one.is_collective,
            is_filled_late=kind > 0.9 and not one.after,
        )
        for one in random_works(rng)
    ]
    assert latency_hiding_order(works) == slow_order(works)
