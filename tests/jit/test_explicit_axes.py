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


def mlp(x, w):
    h = jnp.tanh(jnp.einsum("bd,df->bf", x, w["up"], out_sharding=P("data", "tensor")))
    return jnp.einsum("bf,fd->bd", h, w["down"], out_sharding=P("data", None))


def in_loop(x, w):
    return jax.lax.scan(lambda h, _: (mlp(h, w), None), x, None, length=3)[0]


def gradients(x, w):
    return jax.grad(lambda w: (in_loop(x, w) ** 2).sum())(w)


def made_and_split(x, w):
    y = jnp.ones(x.shape, out_sharding=P("data", "tensor")) + jax.sharding.reshard(x @ w["up"], P(None, "tensor"))
    return y.reshape(8, 4, 2, out_sharding=P(None, "tensor", None)).sum(-1)


def looked_up(x, w):
    rows = jnp.abs(x[:, 0] * 8).astype(jnp.int32)
    return w["up"].at[rows].get(out_sharding=P("data", None))


def recomputed_in_a_branch(x, w):
    block = jax.checkpoint(lambda x: jnp.sin(mlp(x, w)))
    return jax.grad(lambda x: jax.lax.cond(x.sum() > 0, block, lambda x: x * 2, x).sum())(x)


EXPLICIT_PROGRAMS = [mlp, in_loop, gradients, made_and_split, looked_up, recomputed_in_a_branch]
WEIGHTS = {"up": X, "down": X.T}
WEIGHT_SPECS = {"up": P(None, "tensor"), "down": P("tensor", None)}


def verified(program, *args, **options):
    """The result of a program whose predicted collectives are the compiled ones."""
    jitted = sharding.jit(program, **options)
    assert jitted.complete(*args).verify(jitted.lower(*args).compile()).agrees
    return jitted(*args)


@pytest.mark.parametrize("program", EXPLICIT_PROGRAMS)
def test_a_program_that_names_shardings_of_results(explicit, program):
    x, w = jax.device_put(X, P("data")), jax.device_put(WEIGHTS, WEIGHT_SPECS)
    expected, found = jax.jit(program)(x, w), verified(program, x, w)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, expected)
    for y, like in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert y.sharding.mesh == explicit and y.sharding.is_equivalent_to(like.sharding, y.ndim)


def test_such_a_program_under_a_mesh_with_auto_axes():
    with sharding.mesh(data=2, tensor=4):
        y = verified(mlp, X, WEIGHTS, in_shardings=(P("data"), WEIGHT_SPECS))
        assert y.sharding.spec == P("data") and AxisType.Explicit not in y.sharding.mesh.axis_types
    np.testing.assert_allclose(y, np.tanh(X @ X) @ X.T, rtol=1e-4, atol=1e-5)


def test_a_closed_over_array_of_the_mesh(explicit):
    w = jax.device_put(X, P("data", "tensor"))
    np.testing.assert_allclose(verified(lambda x: x @ w, X), X @ X, rtol=1e-5, atol=1e-5)


def test_a_sharding_that_jax_cannot_tell_is_an_error_that_says_what_to_write():
    def contracted(x, w):
        return jax.sharding.reshard(x, P(None, "tensor")) @ w["down"]

    with sharding.mesh(data=2, tensor=4):
        step = sharding.jit(contracted, in_shardings=(P("data"), WEIGHT_SPECS))
        with pytest.raises(ShardingError, match=r"(?s)names the sharding.*annotate\(x, P\(...\)\)"):
            step(X, WEIGHTS)


def test_the_reason_is_the_line_that_names_the_sharding():
    with sharding.mesh(data=2, tensor=4):
        c = sharding.jit(mlp, in_shardings=(P("data"), WEIGHT_SPECS)).complete(X, WEIGHTS)
    assert "annotate at test_explicit_axes.py" in str(c.why("out", dim=0))


def test_explicit_axes_inside(explicit):
    inner = jax.sharding.explicit_axes(lambda x: x * 2, axes=("data", "tensor"), in_sharding=P("data"))
    np.testing.assert_allclose(sharding.jit(lambda x: inner(x) + 1)(X), X * 2 + 1)


def exchanged(x, w):
    h = jnp.tanh(x @ w["up"])
    part = jax.sharding.explicit_axes(
        lambda h, w: jax.sharding.reshard(jnp.dot(h, w, out_sharding=P("data", None)), P(None, "tensor")),
        in_sharding=(P("data", "tensor"), P("tensor", None)),
    )
    return (part(h, w["down"]) * 2).sum()


def some_axes(x, w):
    part = jax.sharding.explicit_axes(lambda x: jnp.tanh(x) * 2, axes=("data",), in_sharding=P("data", None))
    return part(x) @ w["up"]


def with_shard_map(x, w):
    def part(x):
        return jax.shard_map(lambda x: x + jax.lax.axis_index("data"), in_specs=P("data"), out_specs=P("data"))(x)

    return jax.sharding.explicit_axes(part, in_sharding=P("data", None))(x) @ w["up"]


def auto_again(x, w):
    def part(x, w):
        return jax.sharding.auto_axes(lambda x, w: x @ w, out_sharding=P("data", "tensor"))(x, w).sum(0)

    return jax.sharding.explicit_axes(part, in_sharding=(P("data", None), P(None, "tensor")))(x, w["up"])


@pytest.mark.parametrize("program", [exchanged, jax.grad(exchanged, argnums=1), some_axes, with_shard_map, auto_again])
def test_what_such_parts_send_is_predicted(program):
    expected = jax.jit(program)
    with jax.set_mesh(jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)):
        expected = expected(X, WEIGHTS)
    with sharding.mesh(data=2, tensor=4):
        found = verified(program, X, WEIGHTS, in_shardings=(P("data"), WEIGHT_SPECS))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, expected)


def test_what_such_parts_send_counts_against_the_limit():
    options = {"in_shardings": (P("data"), WEIGHT_SPECS), "max_implicit_bytes": 16}
    with sharding.mesh(data=2, tensor=4), pytest.raises(ShardingError, match="max_implicit_bytes|implicit"):
        sharding.jit(exchanged, **options).complete(X, WEIGHTS)


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
