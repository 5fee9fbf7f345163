"""Gradient accumulation in a loop: weights are gathered, and sums reduced, as the ledger says, on three compilers."""

import jax
import jax.numpy as jnp
import pytest
from support.compilers import COMPILERS, predicted_and_compiled

import sharding
from sharding import P

SIZES = {"data": 2, "model": 4}
W = jax.ShapeDtypeStruct((256, 512), "float32")
XS = jax.ShapeDtypeStruct((4, 64, 256), "float32")
MANY = jax.ShapeDtypeStruct((4, 2048, 256), "float32")
"""So many rows that the weights are gathered, not the rows."""


def accumulated(loss):
    """The sums of a loss and of its gradients over microbatches."""

    def step(w, xs):
        def add(total, x):
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(w, x)), None

        return jax.lax.scan(add, (0.0, jnp.zeros_like(w)), xs)[0]

    return step


def plain(w, x):
    return jnp.tanh(x @ w).sum()


def mixed(w, x):
    return jnp.tanh(x.astype("bfloat16") @ w.astype("bfloat16")).astype("float32").sum()


LOSSES = {
    "plain": plain,
    "mixed precision": mixed,
    "scaled weights": lambda w, x: plain(0.5 * w, x),
    "recomputed": jax.checkpoint(plain),
    "recomputed, mixed precision": jax.checkpoint(mixed),
}


@pytest.mark.parametrize(("backend", "described"), COMPILERS.values())
@pytest.mark.parametrize("xs", [XS, MANY], ids=["few rows", "many rows"])
@pytest.mark.parametrize("name", LOSSES)
def test_as_compiled(name, xs, backend, described):
    predicted, compiled = predicted_and_compiled(
        accumulated(LOSSES[name]),
        (W, xs),
        backend,
        described,
        SIZES,
        in_shardings=(P("data", "model"), P(None, "data")),
        out_shardings=(P(), P("data", "model")),
    )
    assert predicted == compiled


@pytest.mark.parametrize(
    ("name", "expected"),
    [("mixed precision", [(1, True)]), ("recomputed, mixed precision", [(4, False), (1, True)])],
)
def test_weights_are_gathered_before_the_loop_and_where_recomputed(name, expected):
    with sharding.mesh(SIZES):
        step = sharding.jit(accumulated(LOSSES[name]), in_shardings=(P("data", "model"), P(None, "data")))
        ledger = step.complete(W, MANY).communication()
    gathers = [(c.count, "before the loop" in str(c)) for c in ledger if c.kind == "all-gather"]
    assert gathers == expected
