"""`barrier`: which shardings pass it, under every JAX transformation; results are unchanged."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharding
from sharding import P, ShardingError, annotate, barrier, compat

U = P.UNCONSTRAINED
X = np.sin(np.arange(64, dtype=np.float32)).reshape(8, 8)
WAYS = ("forward", "backward", "none")


@pytest.fixture(autouse=True)
def mesh():
    with sharding.mesh(data=2, tensor=4) as m:
        yield m


def barriers(jaxpr):
    """The direction of every barrier in a jaxpr and its sub-jaxprs."""
    found = []
    for eqn in compat.open_jaxpr(jaxpr).eqns:
        found += [eqn.params["allowed"]] if eqn.primitive.name == "barrier" else []
        for _, _, inner in compat.sub_jaxprs(eqn.params):
            found += barriers(inner)
    return found


def traced(f, *args):
    return barriers(jax.make_jaxpr(f)(*args))


def wall(x):
    return barrier(jnp.sin(x), "forward")


def scanned(x):
    return jax.lax.scan(lambda c, _: (wall(c), None), x, None, length=3)[0]


def branched(x):
    return jax.lax.cond(x[0, 0] > 0, wall, jnp.cos, x)


EVERYWHERE = [wall, scanned, branched, jax.jit(wall), jax.checkpoint(wall), jax.vmap(wall)]


@pytest.mark.parametrize("f", EVERYWHERE)
def test_barrier_survives_tracing(f):
    assert traced(f, X) == ["forward"]


@pytest.mark.parametrize("f", EVERYWHERE)
def test_a_tangent_gets_the_same_barrier(f):
    assert traced(lambda x, t: jax.jvp(f, (x,), (t,)), X, X) == ["forward", "forward"]


@pytest.mark.parametrize("f", EVERYWHERE)
def test_a_cotangent_gets_the_flipped_barrier(f):
    found = traced(jax.grad(lambda x: f(x).sum()), X)
    assert "forward" in found and "backward" in found and set(found) == {"forward", "backward"}


@pytest.mark.parametrize("way, cotangent", [("forward", "backward"), ("backward", "forward"), ("none", "none")])
def test_flipped(way, cotangent):
    assert traced(jax.linear_transpose(lambda x: barrier(x, way), X), X) == [cotangent]


@pytest.mark.parametrize(
    "way, passes", [("forward", (True, False)), ("backward", (False, True)), ("none", (False,) * 2)]
)
def test_shardings_pass_in_one_direction_only(way, passes):
    def f(x):
        return annotate(barrier(annotate(jnp.sin(x), name="before"), way), name="behind") * 2

    forward = sharding.jit(f, in_shardings=P("data", U)).complete(X)
    backward = sharding.jit(f, out_shardings=P("data", U)).complete(X)
    assert forward.spec("before") == P("data") and backward.spec("behind") == P("data")
    assert (forward.spec("out") == P("data"), backward.spec("x") == P("data")) == passes


def test_without_a_direction_nothing_passes():
    assert traced(lambda x: barrier({"a": x, "b": [x]}), X) == ["none", "none"]


def test_annotations_on_both_sides_apply():
    def f(x):
        return annotate(barrier(annotate(x * 2, P("data"), name="a")), P(None, "tensor"), name="b") + 1

    step = sharding.jit(f)
    c = step.complete(X)
    assert (c.spec("a"), c.spec("b")) == (P("data"), P(None, "tensor"))
    np.testing.assert_allclose(step(X), 2 * X + 1)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("f", [scanned, branched, jax.checkpoint(wall), jax.vmap(wall)])
def test_results_are_those_of_one_device(f, way):
    def loss(x):
        return (f(barrier(annotate(x, P("data", "tensor")), way)) ** 2).sum()

    expected = jax.grad(lambda x: (f(x) ** 2).sum())(X)
    np.testing.assert_allclose(sharding.jit(jax.grad(loss))(X), expected, rtol=1e-5, atol=1e-6)


def test_gradient_is_isolated_too():
    def loss(x):
        behind = annotate(barrier(jnp.sin(x), "forward"), P("data", U))
        return (behind**2).sum()

    assert sharding.jit(jax.grad(loss)).complete(X).spec("out") == P()


def test_reasons_name_the_barrier():
    def f(x):
        return barrier(x * 2, "backward")

    c = sharding.jit(f, in_shardings=P("data")).complete(X)
    reason = str(c.why("out", dim=0))
    assert reason.startswith("out dim 0 is replicated: data stopped by the barrier at test_propagation_barrier.py:")
    assert c.conflicts == ()


def test_plain_jit_lowers_it_to_shardys():
    f = jax.jit(lambda x: barrier(x * 2, "backward") + 1, in_shardings=P("data"))
    assert "sdy.propagation_barrier" in f.lower(X).as_text() and "BACKWARD" in f.lower(X).as_text()
    out = f(X)
    assert out.is_fully_replicated
    np.testing.assert_allclose(out, 2 * X + 1)


def test_engine_xla_leaves_the_barrier_to_xla():
    step = sharding.jit(lambda x: barrier(x * 2) + 1, in_shardings=P("data"), engine="xla")
    assert step(X).is_fully_replicated


def test_barrier_in_a_program_inside_another_one():
    inner = sharding.jit(lambda x: barrier(x * 2))
    c = sharding.jit(lambda x: inner(annotate(x, P("data"))) + 1).complete(X)
    assert c.spec("x") == P("data") and c.spec("out") == P()


def test_outside_a_trace_it_is_the_array():
    np.testing.assert_array_equal(barrier(X), X)
    keys = jax.random.split(jax.random.key(0), 4)
    assert (jax.jit(lambda k: barrier(k, "none"))(keys) == keys).all()


@pytest.mark.parametrize(
    "way, message",
    [
        ("both", r"(?s)without a barrier.*fix: +x itself"),
        ("sideways", r"(?s)'forward', 'backward' or 'none'.*fix: +sharding.barrier\(x, 'forward'\)"),
        (None, "sharding.barrier\\(x, None\\)"),
    ],
)
def test_bad_direction_is_an_error(way, message):
    with pytest.raises(ShardingError, match=message):
        barrier(X, way)
