"""What loops and recomputations reshard again: an invariant of nested loops once."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from support.compilers import COMPILERS, predicted_and_compiled

import sharding
from sharding import P, annotate

SIZES = {"a": 2, "b": 2, "idle": 2}
X = jax.ShapeDtypeStruct((128, 256), "float32")
W = jax.ShapeDtypeStruct((256, 512), "float32")
SPECS = (P(("a", "b")), P("a", "b"))


def layer(x, w):
    return annotate(jnp.tanh(x @ w @ w.T), P("a", "b"))


def repeated(x, w, times):
    return lax.scan(lambda c, _: (layer(c, w), None), x, None, length=times)[0]


def nested(x, w):
    return lax.scan(lambda c, _: (repeated(c, w, 2), None), x, None, length=3)[0]


def nested_in_a_while(x, w):
    return lax.fori_loop(0, 3, lambda _, c: repeated(c, w, 2), x)


def in_a_branch(x, w):
    """XLA moves nothing out of a branch."""

    def body(c, i):
        return lax.cond(i % 2 == 0, lambda c: repeated(c, w, 2), jnp.sin, c), None

    return lax.scan(body, x, jnp.arange(3))[0]


def recomputed_loop(x, w):
    return jax.grad(lambda x, w: jnp.sum(jax.checkpoint(repeated, static_argnums=2)(x, w, 3) ** 2), (0, 1))(x, w)


def recomputed_nest(x, w):
    return jax.grad(lambda x, w: jnp.sum(jax.checkpoint(nested)(x, w) ** 2), (0, 1))(x, w)


def loop_of_recomputed_loops(x, w):
    """Each recomputation gathers for itself, once for its loop."""

    def loss(x, w):
        body = jax.checkpoint(lambda c: repeated(c, w, 2))
        return jnp.sum(lax.scan(lambda c, _: (body(c), None), x, None, length=3)[0] ** 2)

    return jax.grad(loss, (0, 1))(x, w)


def in_a_call(x, w):
    return jnp.tanh(x @ w) + jax.jit(lambda x, w: jnp.sin(x) @ lax.stop_gradient(w))(x, w)


def around_a_loop(x, w):
    y = lax.fori_loop(0, 3, lambda _, y: jnp.tanh(y @ lax.stop_gradient(w)), x)
    return y @ w


PROGRAMS = [nested, nested_in_a_while, in_a_branch, recomputed_loop, recomputed_nest, loop_of_recomputed_loops]


def gathers(f, platform):
    """How often a piece of the weight is gathered."""
    with sharding.mesh(SIZES):
        ledger = sharding.jit(f, in_shardings=SPECS).complete(X, W).communication().lowered(platform)
    pieces = {W.size * 4 // n for n in (1, 2, 4)}
    return sum(c.count for c in ledger if c.kind == "all-gather" and c.result_bytes in pieces)


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize("f", [nested, nested_in_a_while])
def test_an_invariant_of_nested_loops_is_gathered_once(f, platform):
    assert gathers(f, platform) == gathers(layer, platform) > 0


@pytest.mark.parametrize(("backend", "described"), COMPILERS.values())
@pytest.mark.parametrize("f", PROGRAMS)
def test_gathers_as_compiled(f, backend, described):
    found = predicted_and_compiled(f, (X, W), backend, described, SIZES, in_shardings=SPECS)
    predicted, compiled = (kinds["all-gather"] for kinds in found)
    assert predicted == compiled


@pytest.mark.parametrize(("backend", "described"), COMPILERS.values())
@pytest.mark.parametrize("f", [in_a_call, around_a_loop])
def test_a_copy_is_gathered_with_its_array_on_tpus(f, backend, described):
    shapes = jax.ShapeDtypeStruct((512, 256), "float32"), jax.ShapeDtypeStruct((256, 256), "float32")
    found = predicted_and_compiled(f, shapes, backend, described, {"data": 2, "model": 4}, in_shardings=P("data"))
    count = 1 if backend == "tpu" else 2
    assert [kinds["all-gather"][0] for kinds in found] == [count, count]
