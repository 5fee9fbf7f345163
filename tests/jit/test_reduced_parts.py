"""Reductions of arrays side by side become those of each: the same values, and one all-reduce on TPUs and GPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compilers import COMPILERS, predicted_and_compiled

import sharding
from sharding import P
from sharding.jit.simplification import simplify

A = np.linspace(-2.0, 2.0, 64, dtype=np.float32).reshape(8, 8)
B = np.linspace(5.0, -3.0, 64, dtype=np.float32).reshape(8, 8)

APART = {
    "all finite": lambda a, b: jnp.stack([jnp.isfinite(a).all(), jnp.isfinite(b).all()]).all(),
    "any": lambda a, b: jnp.stack([(a > 1).any(), (b > 9).any()]).any(),
    "norm": lambda a, b: jnp.sqrt(jnp.array([jnp.sum(a * a), jnp.sum(b * b)]).sum()),
    "largest": lambda a, b: jnp.concatenate([a, b], 1).max(1),
    "smallest": lambda a, b: jnp.stack([a, b, a + b], 1).min((1, 2)),
    "stacked last": lambda a, b: jnp.stack([a, b], -1).sum(-1),
}
WHOLE = {
    "along another dim": lambda a, b: jnp.concatenate([a, b], 1).max(0),
    "used again": lambda a, b: (jnp.stack([a, b]).sum(0), jnp.stack([a, b])),
    "one": lambda a, b: jnp.stack([a]).sum(0) + b,
}


def names(f):
    simple = simplify(jax.make_jaxpr(f)(A, B))
    return {eqn.primitive.name for eqn in getattr(simple, "jaxpr", simple).eqns}


@pytest.mark.parametrize("name", APART | WHOLE)
def test_the_same_values(name):
    f = (APART | WHOLE)[name]
    with sharding.mesh(data=8):
        found = sharding.jit(f, in_shardings=(P("data"), P(None, "data")))(A, B)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), found, f(A, B))


@pytest.mark.parametrize("name", APART)
def test_parts_are_reduced_apart(name):
    assert not names(APART[name]) & {"stack", "concatenate"}


@pytest.mark.parametrize("name", WHOLE)
def test_others_stay(name):
    assert names(WHOLE[name]) & {"stack", "concatenate", "broadcast_in_dim"}


@pytest.mark.parametrize(("backend", "described"), COMPILERS.values())
@pytest.mark.parametrize("name", ["any", "norm", "largest"])
def test_as_compiled(name, backend, described):
    args = (jax.ShapeDtypeStruct((64, 512), "float32"),) * 2
    specs = (P("data", "model"), P("data", "model"))
    predicted, compiled = predicted_and_compiled(
        APART[name], args, backend, described, {"data": 2, "model": 4}, in_shardings=specs
    )
    assert predicted == compiled
