"""Programs exported with symbolic dims."""

import jax
import numpy as np
import pytest
from jax import export

import sharding
from sharding import P, annotate


@pytest.fixture(autouse=True)
def mesh():
    with sharding.mesh(data=2, tensor=4) as m:
        yield m


def f(x, w):
    return annotate(x @ w, P("data", "tensor")).sum(axis=1)


@pytest.mark.parametrize("nested", [False, True])
def test_exported_with_a_symbolic_batch(nested):
    step = sharding.jit(f, in_shardings=(P("data"), None))
    (batch,) = export.symbolic_shape("b")
    shapes = jax.ShapeDtypeStruct((2 * batch, 8), "float32"), jax.ShapeDtypeStruct((8, 8), "float32")
    exported = export.export(jax.jit(lambda x, w: step(x, w)) if nested else step)(*shapes)
    w = np.ones((8, 8), np.float32)
    for rows in (4, 8):
        x = np.sin(np.arange(rows * 8, dtype=np.float32)).reshape(rows, 8)
        placed = jax.device_put((x, w), (P("data"), P(None, "tensor")))
        np.testing.assert_allclose(jax.jit(exported.call)(*placed), (x @ w).sum(axis=1), rtol=1e-4, atol=1e-5)


def test_completed_for_an_example(caplog):
    (batch,) = export.symbolic_shape("b")
    x, w = jax.ShapeDtypeStruct((batch, 8), "float32"), jax.ShapeDtypeStruct((8, 8), "float32")
    completion = sharding.jit(f, in_shardings=(P("data"), None)).complete(x, w)
    assert completion.spec("w") == P(None, "tensor")
    assert completion.out_shardings == P("data")
    assert "completed for b=16" in caplog.text
