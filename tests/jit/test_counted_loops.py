"""A `while` that counts from a constant to another is a `scan`, of as many iterations as it runs."""

import operator
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compilers import COMPILERS, predicted_and_compiled

from sharding import P, compat
from sharding.jit.simplification import simplify

X = np.linspace(-1.0, 1.0, 12, dtype=np.float32).reshape(3, 4)
COMPARISONS = [operator.lt, operator.le, operator.gt, operator.ge, operator.ne, operator.eq]
BOUNDS = [-128, -127, -4, -3, 0, 1, 5, 126, 127]


def trips(f, *args):
    """The lengths of the loops in a simplified program; None for a `while`."""
    jaxpr = compat.open_jaxpr(simplify(jax.make_jaxpr(f)(*args)))
    inside = (one for eqn in jaxpr.eqns for one in compat.equations(eqn))
    return [eqn.params.get("length") for eqn in inside if eqn.primitive.name in ("scan", "while")]


def run(compare, start, step, bound, dtype=np.int8):
    """How often a loop runs, counted one by one in the dtype; None if more often than the dtype has values."""
    with np.errstate(over="ignore"):
        i = dtype(start)
        for k in range(2 * 256):
            if not compare(i, dtype(bound)):
                return k
            i = i + dtype(step)
    return None


@pytest.mark.parametrize("compare", COMPARISONS, ids=lambda f: f.__name__)
def test_trips_are_those_that_are_counted_one_by_one(compare):
    """In 8 bits, where counters soon wrap around: such loops may stay, but none has a wrong length."""
    num_known = 0
    for start, step, bound in product([-128, -5, 0, 3, 127], [-7, -1, 1, 2, 50], BOUNDS):

        def f(x, start=start, step=step, bound=bound):
            def body(carry):
                i, x = carry
                return i + jnp.int8(step), 2 * x

            return jax.lax.while_loop(lambda c: compare(c[0], jnp.int8(bound)), body, (jnp.int8(start), x))[1]

        expected, found = run(compare, start, step, bound), trips(f, X)
        if found == [] or found[0] is not None:
            num_known += 1
            assert [expected] == (found or [1])
        else:
            end = None if expected is None else start + expected * step
            assert not expected or not -128 <= end <= 127, (start, step, bound)
    assert num_known > 20 or compare is operator.eq


def two_counters(x):
    """One counts up and one down, until they meet or one is at its end."""

    def holds(carry):
        i, j, _ = carry
        return (i < j) & (j > 2)

    return jax.lax.while_loop(holds, lambda c: (c[0] + 1, c[1] - 2, jnp.sin(c[2])), (0, 20, x))[2]


def behind_a_call(x):
    """The condition and the step are computed in calls."""

    def body(carry):
        i, x = carry
        return jax.jit(lambda i: jnp.int32(i + 2) - 1)(i), jnp.sin(x)

    return jax.lax.while_loop(lambda c: jax.jit(lambda i: jnp.any(i < 4))(c[0]), body, (0, x))[1]


def started_outside(x):
    """A loop in a loop, which starts where a constant of the outer one says."""
    start = jnp.copy(jax.lax.add(1, 1))

    def body(_, x):
        return jax.lax.while_loop(lambda c: c[0] != 8, lambda c: (c[0] + 3, jnp.sin(c[1])), (start, x))[1]

    return jax.lax.fori_loop(0, 5, body, x)


def known_truth(x):
    return jax.lax.while_loop(lambda c: (c[0] < 4) & jnp.array(True), lambda c: (c[0] + 1, jnp.sin(c[1])), (0, x))[1]


COUNTED = {two_counters: [7], behind_a_call: [4], started_outside: [5, 2], known_truth: [4]}


@pytest.mark.parametrize("f", COUNTED)
def test_a_counted_loop_computes_the_same(f):
    assert trips(f, X) == COUNTED[f]
    closed = simplify(jax.make_jaxpr(f)(X))
    (found,) = jax.core.eval_jaxpr(getattr(closed, "jaxpr", closed), closed.consts, X)
    np.testing.assert_allclose(found, f(X), rtol=1e-6)


def until_small(x):
    return jax.lax.while_loop(lambda c: (c[0] < 9) & (c[1].sum() > 1), lambda c: (c[0] + 1, c[1] / 2), (0, x))[1]


def skipping(x):
    """The step depends on the values."""

    def body(carry):
        i, x = carry
        return i + jnp.int32(x[0, 0] > 0) + 1, x / 2

    return jax.lax.while_loop(lambda c: c[0] < 9, body, (0, x))[1]


def exchanged(x):
    """Two counters take turns."""
    return jax.lax.while_loop(lambda c: c[0] < 9, lambda c: (c[1] + 1, c[0] + 1, c[2] / 2), (0, 5, x))[2]


def in_floats(x):
    return jax.lax.while_loop(lambda c: c[0] < 9, lambda c: (c[0] + 1, c[1] / 2), (0.0, x))[1]


def printed(x):
    def body(carry):
        jax.debug.print("{}", carry[0])
        return carry[0] + 1, carry[1] / 2

    return jax.lax.while_loop(lambda c: c[0] < 3, body, (0, x))[1]


@pytest.mark.parametrize("f", [until_small, skipping, exchanged, in_floats, printed])
def test_other_loops_stay(f):
    assert trips(f, X) == [None]


def layers(x, w):
    def body(carry):
        i, j, x = carry
        return i + 1, j + 1, jnp.tanh(x @ w)

    return jax.lax.while_loop(lambda c: (c[0] < 5) & (c[1] < 6), body, (0, jnp.copy(jax.lax.add(1, 1)), x))[2]


@pytest.mark.parametrize(("backend", "described"), COMPILERS.values())
def test_what_a_counted_loop_sends_is_known(backend, described):
    args = jax.ShapeDtypeStruct((64, 512), "float32"), jax.ShapeDtypeStruct((512, 512), "float32")
    specs = P("data", "model"), P("model", None)
    predicted, compiled = predicted_and_compiled(
        layers, args, backend, described, {"data": 2, "model": 4}, in_shardings=specs
    )
    assert predicted == compiled
    assert [count for count, _ in predicted.values()] == [4]
