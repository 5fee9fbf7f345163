"""XLA:TPU moves the real and imaginary parts of complex arrays apart, and reduces three real products per product."""

import jax
import jax.numpy as jnp
import pytest
from support.compilers import COMPILERS, predicted_and_compiled

import sharding
from sharding import P

SIZES = {"data": 2, "model": 4}
X, W = jax.ShapeDtypeStruct((64, 256), "complex64"), jax.ShapeDtypeStruct((256, 128), "complex64")
PRODUCT = P(None, "data"), P("data")


def gathered(x):
    return sharding.annotate(jnp.exp(x), P())


def exchanged(x):
    return sharding.annotate(jnp.exp(x), P(None, "data"))


PROGRAMS = {
    "a product": (lambda x, w: x @ w, (X, W), PRODUCT, {"all-reduce": (3, 3 * 64 * 128 * 4)}),
    "its real part": (lambda x, w: jnp.real(x @ w), (X, W), PRODUCT, {"all-reduce": (2, 2 * 64 * 128 * 4)}),
    "a sum": (lambda x: x.sum(0), [X], P("data"), {"all-gather": (2, 2 * 2 * 256 * 4)}),
    "a gather": (gathered, [X], P("data"), {"all-gather": (2, 2 * 64 * 256 * 4)}),
    "an all-to-all": (exchanged, [X], P("data"), {"all-to-all": (2, 2 * 32 * 256 * 4)}),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_parts_on_tpu(name):
    f, args, specs, expected = PROGRAMS[name]
    with sharding.mesh(SIZES):
        ledger = sharding.jit(f, in_shardings=specs).complete(*args).communication()
    assert ledger.lowered("tpu").by_kind() == expected
    assert sum(c.count for c in ledger.lowered("gpu")) == 1


@pytest.mark.parametrize(("backend", "described"), [COMPILERS["tpu"]])
@pytest.mark.parametrize("name", PROGRAMS)
def test_parts_as_compiled(name, backend, described):
    f, args, specs, _ = PROGRAMS[name]
    predicted, compiled = predicted_and_compiled(f, args, backend, described, SIZES, in_shardings=specs)
    assert predicted == compiled
