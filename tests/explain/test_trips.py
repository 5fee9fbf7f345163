"""Loops of unknown length count as one iteration, and say so, until their trip counts are given."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharding
from sharding import P

X = np.ones((16, 16), np.float32)
W = np.ones((16, 16), np.float32) / 16


def relaxed(x, w):
    """A loop with a product and its sum in the body, and a sum in the condition."""
    return jax.lax.while_loop(lambda c: jnp.sum(c) > 1, lambda c: jnp.tanh(c @ w), x)


def completed(f, *args, specs, sizes):
    with sharding.mesh(**sizes, devices="v5p:2x2x2"):
        return sharding.jit(f, in_shardings=specs).complete(*args)


@pytest.fixture
def completion():
    return completed(relaxed, X, W, specs=(P("data"), P(None, "tensor")), sizes={"data": 4, "tensor": 2})


def counts(completion, *, inside):
    return [c.count for c in completion.communication() if bool(c.loops) == inside]


def test_what_is_in_the_loop_is_marked(completion):
    ledger = completion.communication()
    marked = [c for c in ledger if c.loops]
    assert marked and all("per iteration of the loop at test_trips.py" in c.cause for c in marked)
    assert "per iteration of loops of unknown length: with_trips" in str(ledger)
    estimate = completion.estimate()
    assert "one iteration of the loop of unknown length at test_trips.py" in str(estimate) and estimate.loops


@pytest.mark.parametrize("key", [None, "test_trips.py"])
def test_given_trips_multiply_what_is_in_the_loop_alone(completion, key):
    given = completion.with_trips(10 if key is None else {key: 10})
    before = {(c.kind, c.op, c.source): c for c in completion.communication()}
    for c in given.communication():
        one = before[c.kind, c.op, c.source]
        expected = {1: 10, 2: 11}[one.count] if one.loops else one.count  # the condition runs once more
        assert c.count == expected and not c.loops
    assert any(c.loops for c in before.values())
    assert given.estimate().seconds > 5 * completion.estimate().seconds and not given.estimate().loops
    assert given.memory().peak_bytes == completion.memory().peak_bytes
    assert given.annotate("w", P(None, "tensor")).communication().total_bytes == given.communication().total_bytes


def test_an_invariant_that_is_moved_before_the_loop_is_not_marked():
    def f(x, w):
        return jax.lax.fori_loop(0, jnp.sum(x).astype(int), lambda _, c: jnp.tanh(c @ w), x)

    c = completed(f, X, W, specs=(P("data"), P("data")), sizes={"data": 8})
    (gather,) = [one for one in c.communication() if one.kind == "all-gather"]
    assert not gather.loops and gather.count == 1
    assert [one.count for one in c.with_trips(9).communication() if one.kind == "all-gather"] == [1]


def test_nested_loops_multiply():
    def f(x, w):
        def outer(c):
            return jax.lax.scan(lambda c, _: (relaxed(c, w), None), c, length=3)[0]

        return jax.lax.while_loop(lambda c: c[0, 0] > 2, outer, x)

    c = completed(f, X, W, specs=(P(None, "data"), P()), sizes={"data": 8})
    inner = [one for one in c.communication() if len(one.loops) == 2]
    assert {one.count for one in inner} >= {3}
    twice = c.with_trips(2).communication()
    assert max(one.count for one in twice) == 2 * 3 * (2 + 1)  # the inner condition


@pytest.mark.parametrize("inside", [True, False])
def test_loops_around_and_in_a_shard_map_count(inside):
    def add(x):
        return jax.lax.psum(x, "data")

    def f(x):
        if inside:
            body = lambda x: jax.lax.while_loop(lambda c: c[0, 0] < 9, lambda c: add(c), x)  # noqa: E731
            return jax.shard_map(body, in_specs=P("data"), out_specs=P("data"), check_vma=False)(x)
        step = jax.shard_map(add, in_specs=P("data"), out_specs=P("data"), check_vma=False)
        return jax.lax.while_loop(lambda c: c[0, 0] < 9, step, x)

    c = completed(f, X, specs=P("data"), sizes={"data": 8})
    (row,) = [one for one in c.communication() if one.op.startswith("psum")]
    assert row.loops and row.count == 1
    assert [one.count for one in c.with_trips(5).communication() if one.op.startswith("psum")] == [5]


@pytest.mark.parametrize(("trips", "found"), [(-1, "-1 iterations"), ({"other.py:3": 2}, "no loop at other.py:3")])
def test_wrong_trips_are_errors(completion, trips, found):
    with pytest.raises(sharding.ShardingError, match=found):
        completion.with_trips(trips)


def test_loops_of_known_length_are_not_marked():
    c = completed(
        lambda x, w: jax.lax.fori_loop(0, 4, lambda _, c: c @ w, x),
        X,
        W,
        specs=(P(None, "data"), P()),
        sizes={"data": 8},
    )
    assert not any(one.loops for one in c.communication()) and not c.estimate().loops
