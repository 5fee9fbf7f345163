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
        nodes += made
        ends.append(made[-1])
    return nodes


def slow_order(works):
    """From the end: each turn looks at all nodes, and takes the best of those whose readers are all placed."""
    nodes, order, now, in_flight, released = slow_nodes(works), [], 0.0, False, []

    def left(node):
        return sum(not reader.placed for reader, _ in node.before)

    def release(node):
        node.ready = max(now, earliest(node))
        released.append(node)

    def earliest(node):
        return max([0.0, *((one.done if node.k in one.work.views else one.ready) + wait for one, wait in node.before)])

    def liked(node):
        waits_alone = sum(left(one) == 1 for one in node.after)
        return any(one.part == "end" for one in node.after), waits_alone, node.k

    def best(found):
        deepest = max(node.depth for node in found)
        return max((node for node in found if node.depth == deepest), key=liked)

    def fitting(ready, depth, until):
        deepest = [node for node in ready if node.depth == depth]
        if until:
            room = min(until) - now
            nearest = min(abs(room - node.lasts) for node in deepest)
            deepest = [node for node in deepest if abs(room - node.lasts) == nearest]
        return max(deepest, key=liked)

    def choice():
        waiting = [node for node in released if not node.placed]
        kernels = [node for node in waiting if node.part == "kernel"]
        free = [node for node in kernels if node.lasts == 0 and not node.work.communicates]
        if free:
            return free[-1]
        ends = [node for node in waiting if node.part == "end" or node.work.communicates]
        kernels = [node for node in kernels if not node.work.communicates]
        starts = [node for node in waiting if node.part == "start"]
        ready = [node for node in kernels if node.ready <= now]
        later = sorted((node for node in kernels if node.ready > now), key=lambda node: (node.ready, -node.k))
        if not in_flight and ends:
            due = [node for node in ends if node.ready <= now]
            return best(due) if due else min(ends, key=lambda node: (node.ready, -node.k))
        depth = max((node.depth for node in ready), default=None)
        for start in starts:
            if start.ready > now:
                continue
            if depth is None or ends or 0 < start.depth > depth:
                return start
            kernel = fitting(ready, depth, [node.ready for node in later[:1]])
            room = later[0].ready - now if later else None
            fills = room is not None and abs(room - kernel.lasts) < abs(room - start.lasts)
            return start if start.depth == depth > 0 and not fills and liked(start) > liked(kernel) else kernel
        if ready:
            until = [node.ready for node in starts if node.ready > now] + [node.ready for node in later[:1]]
            return fitting(ready, depth, until)
        if starts and (not later or starts[0].ready <= later[0].ready):
            return starts[0]
        return later[0]

    for node in nodes:
        if not node.before:
            release(node)
    while len(order) < len(nodes):
        node = choice()
        node.ready = max(now, earliest(node)) if node.lasts else now
        node.done = now = node.ready + node.lasts
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
            communicates=not one.is_collective and seed % 2 == 1 and rng.random() < 0.2,
        )
        for one in random_works(rng)
    ]
    assert latency_hiding_order(works) == slow_order(works)
