"""All-gathers whose result is only sliced again: gone from the program and from its ledger."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharding
from sharding import P, annotate, cost

X = np.sin(np.arange(16 * 64, dtype=np.float32)).reshape(16, 64)
W = np.cos(np.arange(64 * 64, dtype=np.float32)).reshape(64, 64)


def made_and_used_over_both_axes(x, w):
    h = annotate(annotate(x @ w, P("data", "model")), P("data"))
    return annotate(jnp.sin(h), P("data", "model"))


def used_in_a_recomputation(x, w):
    h = annotate(annotate(x @ w, P("data", "model")), P("data"))
    return jax.checkpoint(lambda h: annotate(jnp.sin(h), P("data", "model")))(h)


def carried_by_a_loop(x, w):
    h = annotate(annotate(x @ w, P("data", "model")), P("data"))
    return jax.lax.scan(lambda c, _: (jnp.sin(annotate(c, P("data", "model"))), None), h, None, length=3)[0]


def read_whole(x, w):
    h = annotate(annotate(x @ w, P("data", "model")), P("data"))
    return annotate(jnp.sin(h), P("data", "model")), jnp.cumsum(h, 1)


UNREAD = [made_and_used_over_both_axes, used_in_a_recomputation, carried_by_a_loop]


@pytest.mark.parametrize("f", [*UNREAD, read_whole], ids=lambda f: f.__name__)
def test_gathers(f):
    with sharding.mesh(data=2, model=4):
        step = sharding.jit(f, in_shardings=(P("data"), P(None, "model")), out_shardings=None)
        predicted = step.complete(X, W).communication().lowered("cpu").by_kind()
        assert cost.read_compiled(step.lower(X, W).compile()).by_kind() == predicted
        assert ("all-gather" not in predicted) == (f in UNREAD)
        found, expected = jax.device_get((step(X, W), jax.jit(f)(X, W)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected)


def test_the_spec_stays_as_annotated():
    def named(x, w):
        return jnp.sin(annotate(annotate(annotate(x @ w, P("data", "model")), P("data"), name="h"), P("data", "model")))

    with sharding.mesh(data=2, model=4):
        completion = sharding.jit(named, in_shardings=(P("data"), P(None, "model"))).complete(X, W)
    assert completion.spec("h") == P("data")
