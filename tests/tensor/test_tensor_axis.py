"""Checks of the arguments of tensor-parallel layers: what passes, and what an error tells."""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharding
from sharding import P, ShardingError
from sharding.tensor.tensor_axis import check_divides, check_dtype, check_ndim, shard_dim


@pytest.fixture(autouse=True)
def mesh():
    with sharding.mesh(data=2, tensor=4) as m:
        yield m


@pytest.mark.parametrize("ndim", range(4))
@pytest.mark.parametrize(("or_more", "words"), [(False, "required: {} dims"), (True, "at least {} dims")])
def test_number_of_dims(ndim, or_more, words):
    for have in range(5):
        x = jnp.zeros((2,) * have)
        fits = have == ndim or (or_more and have > ndim)
        match = rf"x of shape {re.escape(str(x.shape))}[\s\S]*{words.format(ndim)}"
        with contextlib.nullcontext() if fits else pytest.raises(ShardingError, match=match):
            check_ndim("f(x)", "x", x, ndim, or_more=or_more)


@pytest.mark.parametrize(("axes", "parts"), [("tensor", 4), (("data", "tensor"), 8), (("data",), 2)])
@pytest.mark.parametrize("length", range(1, 20))
def test_lengths_that_axes_divide(axes, parts, length):
    if length % parts == 0:
        check_divides("f(x)", axes, length, "heads")
        return
    division = f"{length} = {length // parts} x {parts} \\+ {length % parts}"
    with pytest.raises(ShardingError, match=rf"{division}[\s\S]*a multiple of {parts}") as error:
        check_divides("f(x)", axes, length, "heads")
    suggested = int(re.findall(r"(\d+) heads", str(error.value))[-1])
    multiples = range(parts, length + 2 * parts, parts)
    assert suggested in multiples
    assert abs(suggested - length) == min(abs(one - length) for one in multiples)


def test_dtypes():
    check_dtype("f(x)", "x", jnp.zeros(3, jnp.int8), np.integer, "integers")
    for dtype in (jnp.float32, jnp.bool_):
        with pytest.raises(ShardingError, match=f"x of dtype {jnp.dtype(dtype).name}"):
            check_dtype("f(x)", "x", jnp.zeros(3, dtype), np.integer, "integers")


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -3])
def test_one_dim_is_sharded_and_the_others_are_open(dim):
    for other in {0, 1, 2} - {dim % 3}:
        asked = P(*("data" if d == other else None for d in range(3)))
        found = sharding.jit(lambda x: shard_dim(x, "tensor", dim), in_shardings=asked).complete(
            jax.ShapeDtypeStruct((8, 8, 8), jnp.float32)
        )
        expected = ["tensor" if d == dim % 3 else "data" if d == other else None for d in range(3)]
        assert tuple(found.out_shardings) + (None,) * (3 - len(found.out_shardings)) == tuple(expected)
