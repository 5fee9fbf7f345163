"""Rotor: as cheap as the best of all persistent schedules within the bytes, and never over them."""

import heapq
import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sharding
from sharding import remat
from sharding.remat.blocks import Block, actions


def chains(most):
    def of(steps):
        sizes, costs = st.integers(0, 9), st.integers(0, 9)
        return st.tuples(
            st.lists(costs, min_size=steps, max_size=steps),
            st.lists(costs, min_size=steps, max_size=steps),
            st.lists(sizes, min_size=steps + 1, max_size=steps + 1),
            st.lists(sizes, min_size=steps, max_size=steps),
        )

    return st.integers(1, most).flatmap(of)


def every(start, stop):
    """All ways to record steps and to run blocks again."""
    if start == stop:
        yield []
        return
    for rest in every(start + 1, stop):
        yield [start, *rest]
    for k in range(start + 1, stop):
        for parts, rest in itertools.product(every(start, k), every(k, stop)):
            yield [Block(start, k, parts), *rest]


def trade_offs(chain):
    """(bytes, cost) of every persistent schedule, by replaying each."""
    for parts in every(0, chain.steps):
        s = remat.Schedule(
            name="any", steps=chain.steps, actions=list(actions(Block(0, chain.steps, parts))), chain=chain
        )
        yield s.peak_bytes, s.cost


def check_all_limits(forward, backward, states, records):
    chain = remat.Chain(state_bytes=states, record_bytes=records, forward_costs=forward, backward_costs=backward)
    points = sorted(set(trade_offs(chain)))
    for limit in sorted({num_bytes for num_bytes, _ in points}):
        s = remat.rotor(forward, backward, states, limit, record_bytes=records)
        s.check()
        assert s.peak_bytes <= limit
        assert s.cost == pytest.approx(min(cost for num_bytes, cost in points if num_bytes <= limit))
    with pytest.raises(sharding.ShardingError, match=rf"fix: *memory_bytes={points[0][0]}$"):
        remat.rotor(forward, backward, states, points[0][0] - 1, record_bytes=records)


@settings(max_examples=25, deadline=None)
@given(chains(5))
def test_equals_brute_force(chain):
    check_all_limits(*chain)


def test_the_least_bytes_that_an_error_tells():
    """Of chains with a large gradient, where what counts is a state that is held only while a block runs again."""
    rng = random.Random(0)
    for _ in range(60):
        steps = rng.choice([3, 4])
        states = [*(rng.choice([2, 5, 9]) for _ in range(steps)), 20]
        records = [rng.choice([0, 1, 3, 9]) for _ in range(steps)]
        chain = remat.Chain(
            forward_costs=[1] * steps, backward_costs=[1] * steps, state_bytes=states, record_bytes=records
        )
        least = min(num_bytes for num_bytes, _ in trade_offs(chain))
        with pytest.raises(sharding.ShardingError, match=rf"fix: *memory_bytes={least}$"):
            remat.rotor([1] * steps, [1] * steps, states, least - 1, record_bytes=records)
        assert remat.rotor([1] * steps, [1] * steps, states, least, record_bytes=records).peak_bytes == least


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_equals_brute_force_on_ten_steps(seed):
    rng = random.Random(seed)
    numbers = [[rng.randint(0, 9) for _ in range(n)] for n in (10, 10, 11, 10)]
    chain = remat.Chain(
        forward_costs=numbers[0], backward_costs=numbers[1], state_bytes=numbers[2], record_bytes=numbers[3]
    )
    points = sorted(set(trade_offs(chain)))
    for limit in {num_bytes for num_bytes, _ in points}:
        s = remat.rotor(*numbers[:3], limit, record_bytes=numbers[3])
        assert s.peak_bytes <= limit
        assert s.cost == pytest.approx(min(cost for num_bytes, cost in points if num_bytes <= limit))


def least_cost(chain, limit):
    """Dijkstra over what is held, whatever the order of actions; a stored state stays until its step's backward."""
    x, w, n = chain.state_bytes, chain.record_bytes, chain.steps
    start = (n - 1, 0, frozenset([0]), frozenset())
    queue, done = [(0.0, 0, start)], set()
    number = itertools.count(1)
    while queue:
        cost, _, state = heapq.heappop(queue)
        if state in done:
            continue
        done.add(state)
        last, at, stored, recorded = state
        if last < 0:
            return cost
        known = stored | {r + 1 for r in recorded}
        held = sum(x[s] for s in stored) + sum(w[r] + (0 if r in known else x[r]) for r in recorded)
        moves = []
        if at is not None:
            if at not in known:
                moves.append((0, held + x[at], (last, at, stored | {at}, recorded)))
            if at <= last and at not in recorded:
                own = 0 if at in known else x[at]
                moves.append((chain.forward_costs[at], held + w[at] + own, (last, at + 1, stored, recorded | {at})))
                step = (last, at + 1, stored, recorded)
                moves.append((chain.forward_costs[at], held + own + x[at + 1], step))
        moves += [(0, held, (last, s, stored, recorded)) for s in known]
        for added, num_bytes, new in moves:
            if num_bytes + x[last + 1] <= limit:
                heapq.heappush(queue, (cost + added, next(number), new))
        if last in recorded and held + x[last + 1] + x[last] <= limit:
            new = (last - 1, None, stored - {last}, recorded - {last})
            heapq.heappush(queue, (cost + chain.backward_costs[last], next(number), new))
    return None


@settings(max_examples=15, deadline=None)
@given(chains(4))
def test_equals_a_search_over_all_orders_of_actions(numbers):
    forward, backward, states, records = numbers
    # A record has the state that its step computes.
    records = [max(record, state) for record, state in zip(records, states[1:], strict=True)]
    chain = remat.Chain(forward_costs=forward, backward_costs=backward, state_bytes=states, record_bytes=records)
    for limit in sorted({num_bytes for num_bytes, _ in trade_offs(chain)}):
        s = remat.rotor(forward, backward, states, limit, record_bytes=records)
        assert s.cost == pytest.approx(least_cost(chain, limit))


@settings(max_examples=10, deadline=None)
@given(chains(12))
def test_cost_falls_with_bytes(numbers):
    forward, backward, states, records = numbers
    most = sum(states) + sum(records) + 2 * max(states) + 1
    peaks = []
    for limit in range(most, 0, -3):
        try:
            s = remat.rotor(forward, backward, states, limit, record_bytes=records)
        except sharding.ShardingError:
            break
        peaks.append(s.cost)
        assert s.peak_bytes <= limit
    assert peaks == sorted(peaks)
    assert min(peaks) == pytest.approx(sum(forward) + sum(backward))


def test_equal_steps_are_never_dearer_than_revolve():
    """With records no larger than a state, c snapshots of Revolve fit in as many bytes."""
    steps = 20
    for snapshots in (2, 3, 5):
        chain = remat.Chain(state_bytes=[1] * (steps + 1))
        reference = remat.revolve(steps, snapshots)
        limit = max(chain.bytes_during("revolve", reference.actions))
        s = remat.rotor([1] * steps, [1] * steps, [1] * (steps + 1), limit)
        assert s.evaluations <= reference.evaluations


def test_large_chain():
    rng = random.Random(0)
    sizes = [rng.randint(1, 10**9) for _ in range(41)]
    costs = [rng.random() for _ in range(40)]
    most = remat.rotor(costs, costs, sizes, 10**12).peak_bytes
    s = remat.rotor(costs, costs, sizes, most // 2)
    assert s.peak_bytes <= most // 2
    assert s.cost < 1.5 * 2 * sum(costs)


def test_gradients_in_the_order_of_its_blocks():
    widths = [8, 64, 4, 32, 8, 16]
    keys = jax.random.split(jax.random.key(0), len(widths) - 1)
    ws = [jax.random.normal(k, s) / 4 for k, s in zip(keys, itertools.pairwise(widths), strict=True)]
    states = [4 * 3 * width for width in widths]
    costs = [2 * 3 * a * b for a, b in itertools.pairwise(widths)]
    full = remat.rotor(costs, costs, states, 10**9)
    s = remat.rotor(costs, costs, states, full.peak_bytes - 1)
    assert s.forwards > full.forwards == len(costs)

    def loss(ws, x, schedule):
        layers = [lambda x, w=w: jnp.tanh(x @ w) for w in ws]
        return (remat.sequence(layers, schedule=schedule)(x) ** 2).sum()

    x = jnp.linspace(-1, 1, 24).reshape(3, 8)
    a, b = (jax.jit(jax.grad(lambda ws, x, one=one: loss(ws, x, one)))(ws, x) for one in (s, full))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), a, b)


@pytest.mark.parametrize("numbers", [([1], [1, 2], [1, 1]), ([1], [-1], [1, 1]), ([], [], []), ([1], [1], [1, 0.5])])
def test_invalid_numbers(numbers):
    with pytest.raises(sharding.ShardingError, match=r"remat\.Chain"):
        remat.rotor(*numbers, 100)
