"""Padding of annotated dims that their axes do not divide, counted shard by shard."""

import itertools
import math

import jax
import jax.numpy as jnp
import pytest

import sharding
from sharding import P
from sharding.annotations.padding import padding_bytes, warn_padding
from sharding.spec import from_partition_spec

SIZES = {"data": 2, "tensor": 4}


def counted(shape, spec, itemsize):
    """The places of all shards, one after the other, that hold no element."""
    parts = [math.prod(SIZES[a] for a in dim.axes) for dim in spec.dims]
    lengths = [-(-n // k) for n, k in zip(shape, parts, strict=True)]
    empty = 0
    for shard in itertools.product(*map(range, parts)):
        for at in itertools.product(*map(range, lengths)):
            places = [k * length + i for k, length, i in zip(shard, lengths, at, strict=True)]
            empty += any(place >= n for place, n in zip(places, shape, strict=True))
    return empty * itemsize


@pytest.mark.parametrize("shape", [(8, 8), (7, 8), (7, 9), (1, 5), (3, 1)])
@pytest.mark.parametrize("pspec", [P("data"), P("data", "tensor"), P(("tensor", "data")), P(None, "tensor"), P()])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_of_padding(shape, pspec, dtype):
    spec = from_partition_spec(pspec, shape, SIZES, asked="")
    x = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    expected = counted(shape, spec, x.dtype.itemsize)
    assert padding_bytes(spec, x, SIZES) == expected
    if expected:
        with pytest.warns(UserWarning, match=rf"asked: dim . of size .*XLA pads it: {expected} bytes more"):
            warn_padding(spec, x, SIZES, "asked")
    else:
        warn_padding(spec, x, SIZES, "asked")  # warnings are errors


def test_the_warning_is_at_the_users_line():
    with sharding.mesh(SIZES), pytest.warns(UserWarning, match="XLA pads it: 8 bytes") as caught:
        jax.eval_shape(lambda x: sharding.annotate(x, P("data")), jax.ShapeDtypeStruct((7, 2), "float32"))
    assert [one.filename for one in caught] == [__file__]
