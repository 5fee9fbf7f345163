"""`put`: global arrays from local data."""

import jax
import numpy as np
import pytest

import sharding
from sharding import P, ShardingError, put

X = np.arange(48, dtype=np.float32).reshape(8, 6)


@pytest.fixture(autouse=True)
def mesh():
    with sharding.mesh(data=4, tensor=2) as m:
        yield m


def test_each_leaf_is_sharded_over_the_mesh():
    batch = put({"x": X, "y": [X.astype(np.int8), jax.numpy.asarray(X)]}, P("data", "tensor"))
    for leaf, expected in zip(jax.tree.leaves(batch), [X, X.astype(np.int8), X], strict=True):
        assert leaf.sharding.spec == P("data", "tensor")
        assert leaf.addressable_shards[0].data.shape == (2, 3)
        assert leaf.dtype == expected.dtype
        np.testing.assert_array_equal(leaf, expected)


def test_without_a_spec_arrays_are_replicated():
    assert put(X).is_fully_replicated
    assert float(put(3.0)) == 3.0


def test_result_is_accepted_by_jit():
    out = sharding.jit(lambda x: x * 2, in_shardings=P("data"))(put(X, P("data")))
    assert out.sharding.spec == P("data")


@pytest.mark.parametrize(
    "spec, message",
    [
        (P("tensor", "data"), r"(?s)dim 1 of size 6 over data=4 = 4: 6 = 1 x 4 \+ 2.*fix: "),
        (P(("data", "tensor"), "data"), "used twice"),
        (P("dat"), "'data' instead of 'dat'"),
        (P(None, None, "data"), "3 entries for 2 dims"),
    ],
)
def test_bad_spec_is_an_error(spec, message):
    with pytest.raises(ShardingError, match=message):
        put(X, spec)


def test_described_devices_hold_no_arrays():
    with sharding.mesh(data=4, devices=4), pytest.raises(ShardingError, match="a mesh over described devices"):
        put(X, P("data"))
