"""A search for the cheapest way to run an op that was cut short says so."""

import jax
import jax.numpy as jnp

import sharding
from sharding import P
from sharding.rewrite import op_strategy, reshard

SHAPE = jax.ShapeDtypeStruct((64, 64), jnp.float32)


def ledger(spec):
    def f(x, w):
        return sharding.annotate(jnp.tanh(x @ w), P(("b", "a"), None))

    with sharding.mesh(a=2, b=4):
        return sharding.jit(f, in_shardings=(spec, P("b", None))).complete(SHAPE, SHAPE).communication()


def test_a_complete_search_says_nothing():
    assert not ledger(P("a", "b")).cut_searches and "cut short" not in str(ledger(P("a", "b")))


def test_strategies_that_were_not_compared_are_reported(monkeypatch):
    monkeypatch.setattr(op_strategy, "MAX_CANDIDATES", 1)
    found = ledger(P("a", "b"))
    assert any(line.startswith("dot_general at test_cut_searches.py") for line in found.cut_searches)
    assert "search cut short: dot_general at test_cut_searches.py" in str(found)


def test_reshards_that_were_not_compared_are_reported(monkeypatch):
    monkeypatch.setattr(reshard, "MAX_PIECES", 0)
    reshard._chain.cache_clear()
    assert any("not every reshard of" in line for line in ledger(P("b", "a")).cut_searches)
