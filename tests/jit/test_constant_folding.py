"""Gathers of whole arrays at constant indices, and scatters of them, become reshapes; others stay."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.compilers import COMPILERS, predicted_and_compiled

import sharding
from sharding import P
from sharding.jit.constant_folding import fold_constants

X = np.linspace(-1.0, 1.0, 24, dtype=np.float32).reshape(3, 8, 1)


def primitives(jaxpr):
    """The names of all primitives, in all bodies."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    for eqn in inner.eqns:
        yield eqn.primitive.name
        for p in eqn.params.values():
            for body in p if isinstance(p, tuple) else (p,):
                if hasattr(body, "eqns"):
                    yield from primitives(body)


def gradient(f):
    return jax.grad(lambda x: jnp.sum(jnp.sin(f(x))))


WHOLE = {
    "take": lambda x: jnp.take(x, 0, axis=-1),
    "gradient": gradient(lambda x: jnp.take(x, 0, axis=-1)),
    "negative": lambda x: jnp.take(x, -1, axis=-1) * 2,
    "in a loop": lambda x: jax.lax.map(lambda row: jnp.take(row, 0, axis=-1), x),
}
PARTS = {
    "one row": lambda x: jnp.take(x, 0, axis=0),
    "index": lambda x: jnp.take(x, jnp.argmax(x[:, 0, 0]), axis=-1),
    "out of bounds": lambda x: jnp.take(x, 1, axis=-1),
    "gradient of a row": gradient(lambda x: jnp.take(x, 1, axis=0)),
}


@pytest.mark.parametrize("name", WHOLE | PARTS)
def test_the_same_numbers(name):
    f = (WHOLE | PARTS)[name]
    with sharding.mesh({"a": 8}):
        np.testing.assert_array_equal(sharding.jit(f)(X), jax.jit(f)(X))


@pytest.mark.parametrize("name", WHOLE)
def test_whole_arrays_are_not_indexed(name):
    found = {*primitives(fold_constants(jax.make_jaxpr(WHOLE[name])(X)))}
    assert not found & {"gather", "scatter-add"}


@pytest.mark.parametrize("name", PARTS)
def test_others_stay(name):
    jaxpr = jax.make_jaxpr(PARTS[name])(X)
    assert fold_constants(jaxpr) is jaxpr


def cross_entropy(w, x, y):
    return jax.value_and_grad(lambda w: optax.softmax_cross_entropy_with_integer_labels(x @ w, y).mean())(w)


@pytest.mark.parametrize(("backend", "described"), COMPILERS.values())
def test_cross_entropy_over_a_sharded_vocabulary(backend, described):
    args = (
        jax.ShapeDtypeStruct((512, 8192), "float32"),
        jax.ShapeDtypeStruct((16, 256, 512), "float32"),
        jax.ShapeDtypeStruct((16, 256), "int32"),
    )
    specs = (P("model", "data"), P("data"), P("data"))
    predicted, compiled = predicted_and_compiled(
        cross_entropy, args, backend, described, {"data": 2, "model": 4}, in_shardings=specs
    )
    assert predicted == compiled


@pytest.mark.parametrize(("backend", "described"), COMPILERS.values())
def test_a_sum_that_is_never_selected_is_not_computed(backend, described):
    def f(x):
        return jax.lax.select(True, jnp.max(x), jnp.sum(x))

    args = (jax.ShapeDtypeStruct((64, 64), "float32"),)
    predicted, compiled = predicted_and_compiled(f, args, backend, described, {"data": 8}, in_shardings=P("data"))
    assert predicted == compiled == {"all-reduce": (1, 4)}


@pytest.mark.parametrize("vmapped", [False, True], ids=["one", "vmapped"])
def test_an_index_that_can_only_be_zero_is_not_computed(vmapped):
    def row(x, i):
        return jax.vmap(lambda x, i: x[i % 1])(x, i) if vmapped else x[i[0] % 1]

    args = (jax.ShapeDtypeStruct((8, 1, 4), "float32"), jax.ShapeDtypeStruct((8,), "int32"))
    if not vmapped:
        args = (jax.ShapeDtypeStruct((1, 4), "float32"), args[1])
    with sharding.mesh({"a": 8}):
        step = sharding.jit(row, in_shardings=(P(), P("a")), out_shardings=P())
        predicted = step.complete(*args).communication().lowered("cpu").by_kind()
        compiled = sharding.cost.read_compiled(step.lower(*args).compile()).by_kind()
    assert compiled == predicted == {}


def test_remainders_are_the_same():
    def fn(i):
        return i % 1, i % 3, -i % 1, i.astype(jnp.float32) % 1

    with sharding.mesh({"a": 8}):
        for ours, plain in zip(sharding.jit(fn)(jnp.arange(8)), fn(jnp.arange(8)), strict=True):
            np.testing.assert_array_equal(ours, plain)


def one_branch(x):
    done = jnp.logical_and(False, jnp.sum(x) > 0)
    return jax.lax.cond(done, lambda x: jnp.sin(x), lambda x: jnp.cos(x), x)


def branch_of_equals(x, i):
    return jax.lax.cond(i <= i, lambda x: jnp.sin(x), lambda x: jnp.cos(x), x)


@pytest.mark.parametrize(("f", "args", "taken"), [(one_branch, (X,), "cos"), (branch_of_equals, (X, 3), "sin")])
def test_a_branch_that_is_always_taken(f, args, taken):
    found = {*primitives(fold_constants(jax.make_jaxpr(f)(*args)))}
    assert not found & {"cond"}
    assert found & {"sin", "cos"} == {taken}
    np.testing.assert_array_equal(jax.jit(f)(*args), jax.core.eval_jaxpr(*closed(f, args), *args)[0])


def closed(f, args):
    """A folded program as open jaxpr and constants."""
    folded = fold_constants(jax.make_jaxpr(f)(*args))
    return getattr(folded, "jaxpr", folded), folded.consts


@pytest.mark.parametrize("i", [-1, 0, 5])
def test_a_switch_with_a_known_index(i):
    def f(x):
        return jax.lax.switch(i, [jnp.sin, jnp.cos, jnp.tanh], x)

    with sharding.mesh({"a": 8}):
        np.testing.assert_allclose(sharding.jit(f)(X), f(X), rtol=1e-6)
