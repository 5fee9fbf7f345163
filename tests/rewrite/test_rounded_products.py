"""Products of quantised arrays that are only read in bfloat16 are summed in bfloat16 by the TPU compiler."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.compilers import COMPILERS, predicted_and_compiled

import sharding
from sharding import P

X, W = jax.ShapeDtypeStruct((16, 64, 256), "int8"), jax.ShapeDtypeStruct((256, 256), "int8")
SCALE = jax.ShapeDtypeStruct((1, 1, 256), "bfloat16")
ROWS, GATHERED = P("data", None, "model"), P("model", "data")
BYTES = 8 * 64 * 256 * 2
"""Of a device's part of the rounded product."""


def product(x, w):
    return lax.dot_general(x, w, (((2,), (0,)), ((), ())), preferred_element_type=jnp.int32)


def scaled(x, w, scale):
    return product(x, w).astype("bfloat16") * scale


def heads(x, w, scale):
    y = jnp.einsum("btk,khd->bthd", x, w.reshape(256, 8, 32), preferred_element_type=jnp.int32)
    return y.astype("bfloat16") * scale[:, :, None, :32]


def repeated(x, w, scale):
    return lax.fori_loop(0, 3, lambda _, y: jnp.round(scaled(y, w, scale)).astype("int8"), x)


def twice_read(x, w, scale):
    y = product(x, w)
    return y.astype("bfloat16") * scale, y.max(-1)


def in_float32(x, w, scale):
    return product(x, w).astype("float32") * scale


def summed(x, w, scale):
    return x.astype("int32").sum(-1).astype("bfloat16") * w[0, 0]


PROGRAMS = {
    "weights as stored": (scaled, P("model"), BYTES),
    "gathered weights": (scaled, GATHERED, BYTES),
    "heads": (heads, GATHERED, BYTES),
    "read twice": (twice_read, GATHERED, 2 * BYTES),
    "float32": (in_float32, GATHERED, 2 * BYTES),
    "no product": (summed, P(), 8 * 64 * 4),
}
"""Name -> a function, the spec of its weights, and the bytes that XLA:TPU all-reduces."""


@pytest.mark.parametrize(("backend", "described"), COMPILERS.values())
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_compiled(name, backend, described):
    f, weights, num_bytes = PROGRAMS[name]
    specs = {"in_shardings": (ROWS, weights, P()), "out_shardings": P("data")}
    sizes = {"data": 2, "model": 4}
    predicted, compiled = predicted_and_compiled(f, (X, W, SCALE), backend, described, sizes, **specs)
    assert compiled == predicted
    if backend == "tpu":
        assert predicted["all-reduce"][1] == num_bytes


@pytest.mark.parametrize(("backend", "described"), COMPILERS.values())
def test_in_a_loop(backend, described):
    shapes = [jax.ShapeDtypeStruct(shape, "int8") for shape in ((16, 8, 2048), (2048, 2048))]
    scale = jax.ShapeDtypeStruct((1, 1, 2048), "bfloat16")
    specs, sizes = (ROWS, P("model"), P()), {"data": 2, "model": 4}
    predicted, compiled = predicted_and_compiled(
        repeated, (*shapes, scale), backend, described, sizes, in_shardings=specs
    )
    assert compiled == predicted


def test_the_same_numbers():
    rng = np.random.default_rng(0)
    x, w = (rng.integers(-127, 127, s.shape, np.int8) for s in (X, W))
    scale = jnp.asarray(rng.normal(size=SCALE.shape), "bfloat16")
    with sharding.mesh(data=2, model=4):
        found = sharding.jit(scaled, in_shardings=(ROWS, GATHERED, P()))(x, w, scale)
    np.testing.assert_array_equal(found, jax.jit(scaled)(x, w, scale))
