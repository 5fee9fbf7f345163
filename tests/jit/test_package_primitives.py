"""Primitives of other packages are sharded by what their implementation computes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import mlir

import sharding
from sharding import P, cost

X = np.linspace(-1.0, 1.0, 32 * 8, dtype=np.float32).reshape(32, 8)


def primitive(name, implementation, result_of):
    """A primitive as packages define them, lowered by its implementation."""
    made = jax.extend.core.Primitive(name)
    made.def_impl(implementation)
    made.def_abstract_eval(result_of)
    mlir.register_lowering(made, mlir.lower_fun(implementation, multiple_results=False))
    return made


def normalized(x, *, scale):
    return scale * x / jnp.max(jnp.abs(x))


NORMALIZE = primitive("normalize", normalized, lambda x, scale: x)
NESTED = primitive("nested", lambda x: NORMALIZE.bind(jnp.tanh(x), scale=2.0), lambda x: x)


def in_a_custom_vjp(x):
    f = jax.custom_vjp(lambda x: NORMALIZE.bind(x, scale=2.0))
    f.defvjp(lambda x: (f(x), None), lambda _, g: (g,))
    return f(x)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: NORMALIZE.bind(x, scale=3.0),
        lambda x: NESTED.bind(x) + 1,
        lambda x: jax.lax.scan(lambda c, row: (NORMALIZE.bind(c + row, scale=1.0), row), jnp.zeros(8), x),
        in_a_custom_vjp,
        lambda x: jnp.searchsorted(jnp.linspace(-1, 1, 9), x),
        lambda x: jnp.nonzero(x[:, 0] > 0, size=16)[0],
    ],
    ids=["one", "nested", "in a loop", "in a custom_vjp", "searchsorted", "nonzero"],
)
def test_it_is_computed_sharded(f):
    with sharding.mesh({"a": 8}) as mesh:
        step = sharding.jit(f, in_shardings=P("a"))
        completion = step.complete(X)
        assert not completion.assignment.graph.unknown
        predicted = completion.communication().lowered("cpu").by_kind()
        assert predicted == cost.read_compiled(step.lower(X).compile(), mesh=mesh).by_kind()
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), step(X), jax.jit(f)(X))


def on_the_host(x):
    return jnp.asarray(np.sort(np.asarray(x)))


def dispatched(x):
    return jax.jit(lambda x: DISPATCHED.bind(x))(x)


ON_THE_HOST = primitive("on_the_host", on_the_host, lambda x: x)
DISPATCHED = primitive("dispatched", dispatched, lambda x: x)


@pytest.mark.parametrize("unknown", [ON_THE_HOST, DISPATCHED])
def test_an_implementation_that_cannot_be_traced_stays(unknown):
    with sharding.mesh({"a": 8}):
        completion = sharding.jit(lambda x: unknown.bind(x), in_shardings=P("a")).complete(X)
    assert completion.assignment.graph.unknown == {unknown.name: 1}
