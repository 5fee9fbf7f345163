"""Trip counts of compiled loops, with and without XLA's `known_trip_count`."""

import re

import jax
import jax.numpy as jnp
import pytest

from sharding.xla.hlo import read_module
from sharding.xla.trip_counts import trip_count

X = jax.ShapeDtypeStruct((4,), jnp.float32)


def counts(text):
    module = read_module(text)
    lines = [(name, line) for name, lines in module.computations.items() for line in lines.values()]
    return sorted((trip_count(module, name, line) for name, line in lines if line.opcode == "while"), key=str)


def scans(x):
    def outer(c, _):
        return jax.lax.scan(lambda c, _: (jnp.sin(c), None), c, None, length=3)[0], None

    return jax.lax.scan(outer, x, None, length=5)[0]


def loop(start, stop, step=1, until=jnp.less):
    """A while loop whose induction variable is the second element of its state."""

    def f(x):
        return jax.lax.while_loop(lambda s: until(s[1], stop), lambda s: (jnp.sin(s[0]), s[1] + step), (x, start))

    return f


def carried_limit(x):
    return jax.lax.while_loop(lambda s: s[0] < s[1], lambda s: (s[0] + 2, s[1], jnp.cos(s[2])), (1, 10, x))[2]


def limit_of_an_outer_loop(x):
    def inner(n, x):
        return jax.lax.while_loop(lambda s: s[0] < n, lambda s: (s[0] + 1, jnp.cos(s[1])), (0, x))[1]

    return jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1], inner(s[1], s[2])), (0, 4, x))[2]


@pytest.mark.parametrize(
    "f, expected",
    [
        (scans, [3, 5]),
        (lambda x: jax.lax.fori_loop(2, 9, lambda i, c: jnp.cos(c) + i, x), [7]),
        (loop(0, 10, 3), [4]),
        (loop(0, 10, 3, jnp.less_equal), [4]),
        (loop(1, 10, 3, jnp.less_equal), [4]),
        (loop(9, 0, -2, jnp.greater), [5]),
        (loop(9, 1, -2, jnp.greater_equal), [5]),
        (carried_limit, [5]),
        (limit_of_an_outer_loop, [3, 4]),
        (lambda x: jax.lax.while_loop(lambda s: jnp.sum(s) < 3, lambda s: s + 1, x), [None]),
        (loop(1, 100, 1, lambda i, stop: i * i < stop), [None]),
        (lambda x: jax.lax.while_loop(lambda s: s[1] < 9, lambda s: (s[0], s[1] * 2), (x, 1)), [None]),
    ],
    ids=[
        "nested scans",
        "fori",
        "by threes",
        "at most",
        "at most, exactly",
        "down",
        "down to",
        "limit carried",
        "limit carried around",
        "by value",
        "squared",
        "doubled",
    ],
)
def test_trip_count_is_derived_from_the_loop(f, expected):
    text = jax.jit(f).lower(X).compile().as_text()
    bare = re.sub(r'"known_trip_count":\{"n":"\d+"\},?', "", text)
    assert counts(bare) == expected
    assert "known_trip_count" not in bare


def test_known_trip_count_takes_precedence():
    text = jax.jit(scans).lower(X).compile().as_text()
    assert 'known_trip_count":{"n":"5"' in text
    assert counts(text.replace('known_trip_count":{"n":"5"', 'known_trip_count":{"n":"50"')) == [3, 50]


def test_a_loop_that_never_runs_or_never_ends():
    condition = """
%condition (s: (s32[])) -> pred[] {{
  %s = (s32[]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %limit = s32[] constant({limit})
  ROOT %c = pred[] compare(%i, %limit), direction=LT
}}

%body (s: (s32[])) -> (s32[]) {{
  %s = (s32[]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %step = s32[] constant({step})
  %next = s32[] add(%i, %step)
  ROOT %t = (s32[]) tuple(%next)
}}

ENTRY %main () -> (s32[]) {{
  %start = s32[] constant(3)
  %t = (s32[]) tuple(%start)
  ROOT %w = (s32[]) while(%t), condition=%condition, body=%body
}}
"""
    assert counts(condition.format(limit=3, step=1)) == [0]
    assert counts(condition.format(limit=8, step=2)) == [3]
    assert counts(condition.format(limit=8, step=0)) == [None]
    assert counts(condition.format(limit=8, step=-1)) == [None]
