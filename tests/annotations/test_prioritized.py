"""Specs with a priority in `in_shardings` and `out_shardings`."""

import jax
import jax.numpy as jnp
import pytest

import sharding
from sharding import P

X = jax.ShapeDtypeStruct((16, 8), jnp.float32)
W = jax.ShapeDtypeStruct((8, 64), jnp.float32)


def dense(x, w):
    return sharding.annotate(x @ w, name="y")


@pytest.fixture(autouse=True)
def mesh():
    with sharding.mesh(data=8):
        yield


@pytest.mark.parametrize(("x", "w", "expected"), [(0, 1, P("data")), (1, 0, P(None, "data"))])
def test_lower_numbers_come_first(x, w, expected):
    specs = sharding.prioritized(P("data"), x), sharding.prioritized(P(None, "data"), w)
    c = sharding.jit(dense, in_shardings=specs, policy="shardy").complete(X, W)
    assert c.spec("y") == expected and c.in_shardings == (P("data"), P(None, "data"))


def test_in_a_pytree_and_for_results():
    def f(args):
        return {"y": dense(*args)}

    specs = ((P("data"), sharding.prioritized(P(None, "data"), 1)),)
    out = {"y": sharding.prioritized(P(None, "data"), 2)}
    c = sharding.jit(f, in_shardings=specs, out_shardings=out).complete((X, W))
    assert c.spec("y") == P("data") and c.out_shardings == {"y": P(None, "data")}


def test_bad_requests():
    with pytest.raises(sharding.ShardingError, match=r"prioritized\(.*-1\)"):
        sharding.prioritized(P("data"), -1)
    with pytest.raises(sharding.ShardingError, match="a PartitionSpec"):
        sharding.prioritized("data", 1)
