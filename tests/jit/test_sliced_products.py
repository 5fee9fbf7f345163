"""Products of which a slice is read compute that slice only, and nothing changes in the numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharding
from sharding import P, cost
from sharding.jit.simplification import simplify

RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 32, 16)).astype(np.float32)
W = RNG.normal(size=(16, 64)).astype(np.float32)


def row_sums(x):
    return x.sum(-1, keepdims=True)


SLICED = {
    "last": (lambda x, w: (x @ w)[:, -1], (8, 1, 64)),
    "first": (lambda x, w: (x @ w)[:2], (2, 32, 64)),
    "columns": (lambda x, w: (x @ w)[..., 3:20], (8, 32, 17)),
    "strided": (lambda x, w: (x @ w)[:, ::4], (8, 8, 64)),
    "both": (lambda x, w: (x @ w)[:, 3:7, :5], (8, 4, 5)),
    "capped": (lambda x, w: 30 * jnp.tanh((x @ w) / 30)[:, -1], (8, 1, 64)),
    "biased": (lambda x, w: (x @ w + w[0][None, None] + row_sums(x))[:, -1].astype(jnp.bfloat16), (8, 1, 64)),
    "batched": (lambda x, w: jnp.einsum("bsf,btf->bst", x, jnp.sin(x))[3:4, :, 9:], (1, 32, 23)),
    "swapped": (lambda x, w: jnp.einsum("fv,bsf->vbs", w, x)[:9], (9, 8, 32)),
    "of a product": (lambda x, w: (jnp.sin(x @ w) @ w.T)[:, -1], (8, 1, 16)),
}
"""Name -> a function, and the shape of its last product."""
WHOLE = {
    "read twice": lambda x, w: (lambda y: (y[:, -1], y.sum()))(x @ w),
    "most rows": lambda x, w: (x @ w)[:, 1:],
    "returned": lambda x, w: (lambda y: (y[:, -1], y))(x @ w),
    "no product": lambda x, w: jnp.tanh(x)[:, -1],
    "summed": lambda x, w: jnp.cumsum(x @ w, 1)[:, -1],
}


def products(jaxpr):
    return [eqn.outvars[0].aval.shape for eqn in jaxpr.jaxpr.eqns if eqn.primitive.name == "dot_general"]


@pytest.mark.parametrize("name", SLICED | WHOLE)
def test_the_same_numbers(name):
    f = SLICED[name][0] if name in SLICED else WHOLE[name]
    with sharding.mesh(a=2, b=4):
        found = sharding.jit(f, in_shardings=(P("a"), P(None, "b")))(X, W)
    for one, expected in zip(jax.tree.leaves(found), jax.tree.leaves(jax.jit(f)(X, W)), strict=True):
        np.testing.assert_allclose(one.astype(np.float32), expected.astype(np.float32), rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("name", SLICED)
def test_products_of_slices(name):
    f, shape = SLICED[name]
    assert products(simplify(jax.make_jaxpr(f)(X, W)))[-1] == shape


def test_all_products_of_a_chain_are_sliced():
    f, _ = SLICED["of a product"]
    assert products(simplify(jax.make_jaxpr(f)(X, W))) == [(8, 1, 64), (8, 1, 16)]


@pytest.mark.parametrize("name", WHOLE)
def test_others_stay(name):
    jaxpr = jax.make_jaxpr(WHOLE[name])(X, W)
    assert products(simplify(jaxpr)) == products(jaxpr)


def test_a_long_chain_of_ops_stays():
    def f(x, w):
        y = x @ w
        for _ in range(2000):
            y = jnp.sin(y)
        return y[:, -1]

    assert products(simplify(jax.make_jaxpr(f)(X, W))) == [(8, 32, 64)]


def test_in_a_shard_map():
    def f(x, w):
        return jax.shard_map(lambda x, w: (x @ w)[:, -1], in_specs=(P("a"), P()), out_specs=P("a"))(x, w)

    with sharding.mesh(a=8):
        found = sharding.jit(f)(X, W)
    np.testing.assert_allclose(found, (X @ W)[:, -1], rtol=1e-4, atol=1e-5)


def test_the_logits_of_the_last_token_alone_are_stored():
    shapes = jax.ShapeDtypeStruct((16, 256, 64), "float32"), jax.ShapeDtypeStruct((64, 4096), "float32")
    with sharding.mesh(a=2, b=4):
        step = sharding.jit(lambda x, w: jnp.tanh((x @ w) / 30)[:, -1], in_shardings=(P("a"), P(None, "b")))
        predicted = step.complete(*shapes).memory(platform="cpu").peak_bytes
        compiled = cost.read_compiled(step.lower(*shapes).compile()).peak_bytes
    assert predicted == pytest.approx(compiled, rel=0.05)
    assert compiled < 8 * 256 * 64 * 4 + 64 * 1024 * 4 + 8 * 1024 * 4 * 4
