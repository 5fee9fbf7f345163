"""Which calls share a compiled program."""

import jax
import numpy as np
import pytest

import sharding
from sharding import P

X = np.sin(np.arange(64, dtype=np.float32)).reshape(8, 8)


@pytest.fixture(autouse=True)
def mesh():
    with sharding.mesh(data=2, tensor=4) as m:
        yield m


def test_an_array_that_is_sharded_as_inferred_fits_the_program():
    step = sharding.jit(lambda x: sharding.annotate(x * 2, P("data")))
    inferred = step.complete(X)
    y = step(X)
    assert step.complete(y) is step.complete(np.asarray(y)) is inferred
    step(y)
    assert step._cache_size() == 1
    other = jax.device_put(X, P(None, "tensor"))
    assert step.complete(other) is not inferred
    np.testing.assert_allclose(step(other), X * 2)
    assert step._cache_size() == 2
    assert step.complete(X) is inferred


@pytest.mark.parametrize("changed", [X[:4], X.astype(np.int32), X[0]], ids=["shape", "dtype", "ndim"])
def test_another_shape_or_dtype_is_another_program(changed):
    step = sharding.jit(lambda x: x * 2)
    step(X)
    np.testing.assert_array_equal(step(changed), changed * 2)
    assert step._cache_size() == 2
