"""Vectors that TPUs gather by an all-reduce."""

import jax
import pytest
from support.compilers import COMPILERS, predicted_and_compiled

import sharding
from sharding import P

SIZES = {"data": 2, "model": 4}
BY_ALL_REDUCE = {
    "short": ((64,), P("data")),
    "not a multiple of the lanes": ((640,), P("data")),
    "over more devices": ((256,), P("model")),
    "over all": ((512,), P(("data", "model"))),
    "with dims of size 1": ((1, 320, 1), P(None, "data")),
}
BY_ALL_GATHER = {
    "a row per device": ((256,), P("data")),
    "rows": ((768,), P("data")),
    "all rows": ((1024,), P(("data", "model"))),
    "a short matrix": ((2, 64), P(None, "data")),
}
ARRAYS = BY_ALL_REDUCE | BY_ALL_GATHER


def gathered(x):
    return x + 1


@pytest.mark.parametrize("name", ARRAYS)
def test_the_kind_on_tpus(name):
    shape, spec = ARRAYS[name]
    x = jax.ShapeDtypeStruct(shape, "float32")
    with sharding.mesh(SIZES):
        ledger = sharding.jit(gathered, in_shardings=spec, out_shardings=P()).complete(x).communication()
    assert [c.kind for c in ledger.lowered("gpu")] == ["all-gather"]
    assert [c.kind for c in ledger.lowered("tpu")] == ["all-reduce" if name in BY_ALL_REDUCE else "all-gather"]


@pytest.mark.parametrize(("backend", "described"), COMPILERS.values())
@pytest.mark.parametrize("name", ARRAYS)
def test_as_compiled(name, backend, described):
    shape, spec = ARRAYS[name]
    x = jax.ShapeDtypeStruct(shape, "float32")
    predicted, compiled = predicted_and_compiled(
        gathered, (x,), backend, described, SIZES, in_shardings=spec, out_shardings=P()
    )
    assert predicted == compiled
