"""Carries of a `while` that only pass a value on become constants, also behind selections with known conditions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding

import sharding
from sharding import P, compat
from sharding.jit.constant_folding import fold_constants
from sharding.jit.unchanged_carries import carried_as_constants

X = np.linspace(-1.0, 1.0, 64, dtype=np.float32).reshape(8, 8)


def where(condition, x, y):
    """A selection in a call, as `jnp.where` makes it; `while_loop` does not see through it."""
    return jnp.where(condition, x, y)


def behind_a_selection(x):
    return lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.sin(c[1]) + c[2], where(True, c[2], c[1])), (0, x, 2 * x)
    )


def read_by_the_condition(x):
    return lax.while_loop(
        lambda c: (c[0] < 3) & (c[2].sum() < 1e6),
        lambda c: (c[0] + 1, jnp.sin(c[1]) + c[2], where(True, c[2], c[1])),
        (0, x, 2 * x),
    )


def with_consts_before(x):
    y, limit = jnp.cos(x), 3 + x[0, 0]
    return lax.while_loop(
        lambda c: c[0] < limit, lambda c: (c[0] + 1, where(True, c[1], c[2]), jnp.sin(c[2]) + y * c[1]), (0.0, x, y)
    )


def nested(x):
    def body(c):
        inner = lax.while_loop(
            lambda d: d[0] < 2, lambda d: (d[0] + 1, where(True, d[1], d[2]), d[2] * d[1]), (0, *c[1:])
        )
        return c[0] + 1, inner[1], inner[2]

    return lax.while_loop(lambda c: c[0] < 2, body, (0, x, 2 * x))


def updated(x):
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, where(c[0] < 1, c[1], 2 * c[1])), (0, x))


FUNCTIONS = {
    "behind a selection": (behind_a_selection, [3], [2]),
    "read by the condition": (read_by_the_condition, [3], [2]),
    "with constants before": (with_consts_before, [3], [2]),
    "nested": (nested, [3, 3], [2, 2]),
    "updated": (updated, [2], [2]),
}
"""Name -> a function, the numbers of carries of its loops, and those that change."""


def loops(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("scan", "while"):
            yield eqn
            yield from loops(compat.open_jaxpr(eqn.params.get("body_jaxpr", eqn.params.get("jaxpr"))))


def num_carries(jaxpr):
    return [len(eqn.outvars) for eqn in loops(jaxpr.jaxpr)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_does_not_change_is_not_carried(name):
    f, before, after = FUNCTIONS[name]
    jaxpr = jax.make_jaxpr(f)(X)
    assert num_carries(jaxpr) == before
    assert num_carries(fold_constants(jaxpr)) == after


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_same_numbers(name):
    f, *_ = FUNCTIONS[name]
    with sharding.mesh({"a": 8}):
        found = sharding.jit(f, in_shardings=P("a"))(X)
    for a, b in zip(found, jax.jit(f)(X), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_a_condition_that_prints_stays():
    def condition(c):
        jax.debug.print("{}", c[0])
        return c[0] < 2

    (loop,) = loops(jax.make_jaxpr(lambda x: lax.while_loop(condition, lambda c: (c[0] + 1, c[1]), (0, x)))(X).jaxpr)
    assert carried_as_constants(loop) == (loop, {})


def test_a_selection_with_a_known_predicate_is_its_case():
    def f(x):
        return where(False, x, jnp.sin(x)) + jnp.where(jnp.zeros((8, 8), bool), x, 1.0)

    jaxpr = jax.make_jaxpr(f)(X)
    assert str(jaxpr).count("select_n") == 2
    assert "select_n" not in str(fold_constants(jaxpr))
    with sharding.mesh({"a": 8}):
        np.testing.assert_allclose(sharding.jit(f, in_shardings=P("a"))(X), np.sin(X) + 1, rtol=1e-6)


@pytest.mark.parametrize("has_sharding", [False, True])
def test_what_a_call_returns_as_it_is_is_its_operand_unless_it_reshards(has_sharding):
    with sharding.mesh({"a": 8}):
        there = NamedSharding(Mesh(np.array(jax.devices()), "a"), P("a"))
        options = {"out_shardings": there} if has_sharding else {}
        call = jax.jit(lambda x, y: (x, y * 2), **options)
        simple = fold_constants(jax.make_jaxpr(lambda x: call(x, x)[0])(X)).jaxpr
    assert (simple.outvars[0] is simple.invars[0]) == (not has_sharding)
