"""Meshes with Explicit axes, JAX's default, and meshes set in JAX's old way."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding

import sharding
from sharding import P, ShardingError, annotate

X = np.sin(np.arange(64, dtype=np.float32)).reshape(8, 8)


@pytest.fixture
def explicit():
    m = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(m):
        yield m


def f(x, w):
    return jnp.tanh(x @ annotate(w, P(None, "tensor")))


def test_results_are_on_the_users_mesh(explicit):
    step = sharding.jit(f, in_shardings=(P("data"), None))
    for x in (X, jax.device_put(X, P("data")), jax.device_put(X, P("data"))):
        y = step(x, jnp.asarray(X))
        assert y.sharding == NamedSharding(explicit, P("data", "tensor"))
        np.testing.assert_allclose(y, np.tanh(X @ X), rtol=1e-5, atol=1e-6)
    assert step.complete(X, X).spec("w") == P(None, "tensor")
    assert step.eval_shape(X, X).sharding == y.sharding
    assert step.lower(X, X).compile().output_shardings == y.sharding


def test_the_shardings_of_arguments_are_annotations(explicit):
    x = jax.device_put(X, P("data", "tensor"))
    assert sharding.jit(lambda x: x * 2)(x).sharding.spec == P("data", "tensor")

    @jax.jit
    def outer(x):
        y = sharding.jit(lambda x: jnp.sin(x) * 2)(x)
        assert jax.typeof(y).sharding.spec == P("data", "tensor")
        return y

    np.testing.assert_allclose(outer(x), np.sin(X) * 2, rtol=1e-5)


@pytest.mark.parametrize("engine", ["sharding", "shardy", "xla"])
def test_transformations(explicit, engine):
    step = sharding.jit(f, in_shardings=(P("data"), None), engine=engine)
    x, w = jax.device_put(X, P("data")), jax.device_put(X, P(None, "tensor"))

    def loss(x, w):
        return jnp.tanh(x @ w).sum()

    with jax.set_mesh(Mesh(explicit.devices, explicit.axis_names)):
        expected = jax.grad(loss)(jnp.asarray(X), jnp.asarray(X))
    np.testing.assert_allclose(jax.grad(lambda x: step(x, w).sum())(x), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(jax.jit(step)(x, w), np.tanh(X @ X), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jax.vmap(step, (0, None))(jnp.stack([x, x]), w)[1], np.tanh(X @ X), rtol=1e-5, atol=1e-6)


def test_arrays_of_an_explicit_mesh_under_an_auto_one(explicit):
    x = jax.device_put(X, P("data", "tensor"))
    with sharding.mesh(data=2, tensor=4) as auto:
        step = sharding.jit(lambda x: x @ x, donate_argnums=0)
        assert step.complete(x).spec("x") == P("data", "tensor")
        y = step(x)
        assert y.sharding.mesh == auto
        np.testing.assert_allclose(y, X @ X, rtol=1e-5, atol=1e-5)
        assert x.is_deleted()
        z = jax.device_put(X, NamedSharding(auto, P("data")))
    assert sharding.jit(lambda x: x * 2)(z).sharding == NamedSharding(explicit, P("data"))


def test_a_mesh_with_explicit_and_auto_axes():
    mixed = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Explicit, AxisType.Auto))
    with jax.set_mesh(mixed):
        y = sharding.jit(f, in_shardings=(P("data"), None))(X, X)
        assert y.sharding == NamedSharding(mixed, P("data", "tensor"))
        np.testing.assert_allclose(y, np.tanh(X @ X), rtol=1e-5, atol=1e-6)


def test_annotate_outside_of_a_jitted_function(explicit):
    x = annotate(jnp.asarray(X), P("data"))
    assert x.sharding == NamedSharding(explicit, P("data", None))
    y = jax.jit(lambda x: annotate(x, P(None, "tensor")) * 2)(x)
    assert y.sharding.spec == P(None, "tensor")
    z = jax.jit(lambda x: annotate(x, P(P.UNCONSTRAINED, "tensor")) * 2)(x)
    assert z.sharding.spec == P("data", "tensor")


def test_a_program_of_explicit_mode_is_an_error_that_says_what_to_write(explicit):
    w = jax.device_put(X, P("data"))
    for program in (lambda x: jax.sharding.reshard(x, P("data")), lambda x: jnp.dot(x, x, out_sharding=P("data"))):
        with pytest.raises(ShardingError, match=r"(?s)Auto.*sharding.annotate\(x, P\(...\)\)"):
            sharding.jit(program)(X)
    with pytest.raises(ShardingError, match=r"(?s)closes over.*as an argument"):
        sharding.jit(lambda x: x @ w)(X)


def test_explicit_axes_inside(explicit):
    inner = jax.sharding.explicit_axes(lambda x: x * 2, axes=("data", "tensor"), in_sharding=P("data"))
    np.testing.assert_allclose(sharding.jit(lambda x: inner(x) + 1)(X), X * 2 + 1)


def test_mesh_of_a_with_statement():
    step = sharding.jit(f, in_shardings=(P("data"), None))
    with warnings.catch_warnings(action="ignore"), Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "tensor")) as m:
        for _ in range(2):
            y = step(X, X)
            assert y.sharding.is_equivalent_to(NamedSharding(m, P("data", "tensor")), 2)
            np.testing.assert_allclose(y, np.tanh(X @ X), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(jax.jit(lambda x: step(x, X))(X), np.tanh(X @ X), rtol=1e-5, atol=1e-6)


def test_what_is_simplified_is_traced_with_auto_axes(explicit):
    """The gradient of the usual loss: zeros are folded, for which equations are traced anew."""

    def loss(w, x, labels):
        return optax.softmax_cross_entropy_with_integer_labels(x @ w, labels).mean()

    labels = np.arange(8) % 3
    found = sharding.jit(jax.grad(loss), in_shardings=(P(None, "tensor"), P("data"), P("data")))(X, X, labels)
    assert found.sharding.mesh == explicit
    with sharding.mesh(data=2, tensor=4):
        expected = sharding.jit(jax.grad(loss))(X, X, labels)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
