"""Loops and branches without the results that nothing reads take as much as those that never had them."""

from functools import partial

import jax.numpy as jnp
import pytest
from jax import lax
from support import peak_memory
from support.peak_memory import floats, temporary_bytes

from sharding.memory.compiler_traits import TRAITS

X = floats(256, 256)


def stacked(x):
    """The stack of carries is not read, and in the second stack's shape nothing else is."""
    return lax.scan(lambda c, _: (jnp.sort(c @ c), (c, jnp.sort(c) @ c)), x, None, length=8)[0]


def unstacked(x):
    return lax.scan(lambda c, _: (jnp.sort(c @ c), None), x, None, length=8)[0]


def carried(x, *, depth, has_more):
    """Loops in loops that hand an array on and write into it, which nothing reads in the end."""

    def loop(depth, state):
        def body(state):
            k, c, more = state
            if depth:
                _, c, more = loop(depth - 1, (0, c, more))
            more = more.at[k].set(c) if has_more else more
            return k + 1, jnp.sort(c @ c) + c, more

        return lax.while_loop(lambda state: state[0] < 8, body, state)

    more = jnp.zeros((8, *x.shape) if has_more else ())
    return loop(depth, (0, x, more))[1]


@pytest.mark.parametrize("platform", TRAITS)
def test_a_stack_that_nothing_reads_is_not_stored(platform):
    assert temporary_bytes(stacked, [X], platform) == temporary_bytes(unstacked, [X], platform)


@pytest.mark.parametrize("platform", TRAITS)
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_carry_that_nothing_reads_is_not_stored(depth, platform):
    found = [
        temporary_bytes(lambda x, has_more=has_more: carried(x, depth=depth, has_more=has_more), [X], platform)
        for has_more in (False, True)
    ]
    assert found[1] == pytest.approx(found[0], abs=1024)


def branched(x, *, has_more):
    """A loop stacks what branches return, of which nothing reads the stack in the end."""

    def body(c, k):
        def compute(c):
            return jnp.sort(c @ c), jnp.sort(c) @ c if has_more else 0

        def keep(c):
            return c, c if has_more else 0

        return lax.cond(k > 3, compute, keep, c)

    return lax.scan(body, x, jnp.arange(8))[0]


@pytest.mark.parametrize("platform", TRAITS)
def test_a_result_of_branches_that_nothing_reads_is_not_stored(platform):
    found = [
        temporary_bytes(lambda x, has_more=has_more: branched(x, has_more=has_more), [X], platform)
        for has_more in (False, True)
    ]
    assert found[1] == pytest.approx(found[0], abs=1024)


def three_stacks(x):
    """Three stacks that begin as the same zeros, of which the first one is not read."""

    def body(c, _):
        c = jnp.sort(c @ c)
        return c, (jnp.sort(c @ c), c, jnp.sort(c) @ c)

    return lax.scan(body, x, None, length=8)[1][1:]


@pytest.mark.parametrize("platform", TRAITS)
def test_zeros_are_carried_by_a_stack_that_is_read(platform):
    assert temporary_bytes(three_stacks, [X], platform) < 8 * 256 * 256 * 4


@pytest.mark.parametrize("platform", TRAITS)
def test_what_the_condition_reads_is_stored(platform):
    def until_small(x, y):
        def body(state):
            c, other = state
            return jnp.sort(c @ c), jnp.sort(other @ other)

        return lax.while_loop(lambda state: state[1].sum() > 0, body, (x, y))[0]

    def ten_times(x, y):
        return lax.fori_loop(0, 10, lambda _, c: jnp.sort(c @ c), x) if y is not None else x

    both, one = (temporary_bytes(f, [X, X], platform) for f in (until_small, ten_times))
    assert both >= one + 256 * 256 * 4


@pytest.mark.parametrize("platform", TRAITS)
def test_what_another_carry_needs_is_stored(platform):
    def delayed(x):
        return lax.scan(lambda c, _: ((jnp.sort(c[0] @ c[0]), c[0], c[1]), None), (x, x + 1, x + 2), None, length=8)[0][
            2
        ]

    assert temporary_bytes(delayed, [X], platform) >= 2 * 256 * 256 * 4


@peak_memory.newest_jax_only
@pytest.mark.parametrize(
    "pair",
    [
        (stacked, unstacked),
        *(tuple(partial(f, has_more=k) for k in (True, False)) for f in (partial(carried, depth=1), branched)),
    ],
)
def test_xla_drops_them_too(pair):
    with_them, without = (peak_memory.peak_of(one, X, sizes={"data": 8}).compiled for one in pair)
    assert with_them == pytest.approx(without, abs=1024)
