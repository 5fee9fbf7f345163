"""Arrays are resharded in their narrowest dtype, whatever the compiler would do by itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compilers import COMPILERS, predicted_and_compiled

import sharding
from sharding import P

SIZES = {"data": 2, "model": 4}
X = jax.ShapeDtypeStruct((64, 128), "float32")
HALF = jax.ShapeDtypeStruct((64, 128), "bfloat16")
W = jax.ShapeDtypeStruct((128, 256), "bfloat16")
TALL = jax.ShapeDtypeStruct((8192, 512), "bfloat16")
SCALE = jax.ShapeDtypeStruct((128,), "float32")


def narrowed(x, w):
    return jnp.sin(x).astype("bfloat16") @ w


def normalized(x, scale, w):
    y = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale[None]
    return (-y.reshape(8, 8, 128)).astype("bfloat16") @ w


def widened(x):
    return jnp.sort(jnp.exp(x.astype("float32")).T, 0)


def masked(x):
    return jnp.cumsum((x > 0).astype("int32"), 1)


def scaled_product(x, w):
    y = (x.astype("bfloat16").T @ w).astype("float32") * 0.5
    return jnp.sin(sharding.annotate(-y, P("data", P.UNCONSTRAINED)))


def narrowed_product(x, w):
    return sharding.annotate((x.T @ w).astype("bfloat16") * 0.5, P("data", "model"))


def scaled_sum(x):
    return sharding.annotate(-(x.sum(0) * 0.5), P("data"))


PROGRAMS = {
    "narrowed": (narrowed, (X, W), (P("data", "model"), P(None, "model")), ("all-gather", "bfloat16")),
    "normalized": (
        normalized,
        (X, SCALE, W),
        (P("data", "model"), P("model"), P(None, "model")),
        ("all-gather", "bfloat16"),
    ),
    "widened": (widened, (HALF,), (P(None, "model"),), ("all-to-all", "bfloat16")),
    "masked": (masked, (X,), (P(None, "model"),), ("all-to-all", "bool")),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_dtype_that_is_moved(name):
    f, args, specs, moved = PROGRAMS[name]
    with sharding.mesh(SIZES, devices=8):
        ledger = sharding.jit(f, in_shardings=specs).complete(*args).communication()
    first = next(c for c in ledger if c.is_move)
    assert (first.kind, first.dtype) == moved


SUMS = {
    "scaled product": (scaled_product, (TALL, TALL), (P("data"), P("data", "model"))),
    "on idle devices": (scaled_product, (TALL, TALL), (P("data"), P("data"))),
    "not scattered": (
        narrowed_product,
        (jax.ShapeDtypeStruct(TALL.shape, "float32"),) * 2,
        (P("data", "model"), P("data")),
    ),
    "scaled sum": (scaled_sum, (jax.ShapeDtypeStruct((8, 1024, 128), "float32"),), (P("data"),)),
}


@pytest.mark.parametrize("name", ["scaled product", "scaled sum"])
def test_scaled_sums_are_reduce_scattered(name):
    f, args, specs = SUMS[name]
    with sharding.mesh(SIZES, devices=8):
        ledger = sharding.jit(f, in_shardings=specs).complete(*args).communication()
    assert [c.kind for c in ledger] == ["reduce-scatter"]


def test_a_sum_that_is_not_scattered_is_resharded_in_its_narrower_dtype():
    f, args, specs = SUMS["not scattered"]
    with sharding.mesh(SIZES, devices=8):
        ledger = sharding.jit(f, in_shardings=specs).complete(*args).communication()
    assert [(c.kind, c.dtype) for c in ledger] == [("all-reduce", "float32"), ("all-to-all", "bfloat16")]


def test_a_small_sum_is_scattered_where_it_is_made():
    def f(xs, w):
        return sharding.annotate(jax.lax.scan(lambda c, x: (c, x.T @ w), 0.0, xs)[1], P(None, "data"))

    args = jax.ShapeDtypeStruct((2, 8, 8), "float32"), jax.ShapeDtypeStruct((8, 8), "float32")
    with sharding.mesh(SIZES, devices=8):
        specs = P(None, ("data", "model")), P(("data", "model"))
        ledger = sharding.jit(f, in_shardings=specs).complete(*args).communication()
    assert [(c.kind, c.axes) for c in ledger] == [("reduce-scatter", ("data",)), ("all-reduce", ("model",))]


@pytest.mark.parametrize(("backend", "described"), COMPILERS.values(), ids=COMPILERS)
@pytest.mark.parametrize("name", SUMS)
def test_scaled_sums_as_compiled(name, backend, described):
    f, args, specs = SUMS[name]
    predicted, compiled = predicted_and_compiled(f, args, backend, described, SIZES, in_shardings=specs)
    assert predicted == compiled


@pytest.mark.parametrize(("backend", "described"), COMPILERS.values(), ids=COMPILERS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_compiled(name, backend, described):
    f, args, specs, _ = PROGRAMS[name]
    predicted, compiled = predicted_and_compiled(f, args, backend, described, SIZES, in_shardings=specs)
    assert predicted == compiled


def test_values_are_those_of_one_device():
    x, w = jax.random.normal(jax.random.key(0), X.shape), jax.random.normal(jax.random.key(1), W.shape, W.dtype)
    with sharding.mesh(SIZES):
        found = sharding.jit(narrowed, in_shardings=(P("data", "model"), P(None, "model")))(x, w)
    np.testing.assert_allclose(found.astype("float32"), jax.jit(narrowed)(x, w).astype("float32"), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("is_annotated", [True, False])
def test_annotated_values_stay(is_annotated):
    def f(x, w):
        wide = jnp.sin(x)
        wide = sharding.annotate(wide, P("data", None)) if is_annotated else wide
        return wide.astype("bfloat16") @ w

    with sharding.mesh(SIZES, devices=8):
        ledger = sharding.jit(f, in_shardings=(P("data", "model"), P(None, "model"))).complete(X, W).communication()
    (moved,) = (c for c in ledger if c.is_move)
    assert moved.dtype == ("float32" if is_annotated else "bfloat16")


def test_every_axis_has_a_reason():
    f, args, specs, _ = PROGRAMS["normalized"]
    with sharding.mesh(SIZES, devices=8):
        assignment = sharding.jit(f, in_shardings=specs).complete(*args).assignment
    sharded = [key for key in assignment.reasons if key[0] in assignment.graph.makers]
    assert sharded
    for value, dim, axis in sharded:
        assert assignment.chain(value, dim, axis)[-1][2].word == "annotated"
