"""What tiles add to arrays on TPUs, by hand and against the compiler, ahead of time."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from support import compilers
from support.peak_memory import compiled_temporary_bytes, temporary_bytes

from sharding.memory.tile_layouts import Minor, padded_bytes

COUNT = 1 << 16


def minor(*dims):
    return Minor(frozenset(dims), frozenset(dims))


@pytest.mark.parametrize(
    ("shape", "itemsize", "dims", "expected"),
    [
        ((524288, 3), 4, None, 4 * 524288 * 4),  # rows of 3, stored as 4 of 524288
        ((2048, 11, 3, 3), 4, None, 11 * 3 * 4 * 2048 * 4),
        ((2048, 11, 3, 3), 4, minor(2, 3), 2048 * 11 * 4 * 128 * 4),  # small matrices
        ((32, 4, 197, 197), 4, minor(2, 3), 32 * 4 * 200 * 256 * 4),  # weights of an attention
        ((8, 32, 256, 256), 2, minor(0, 1), 8 * 128 * 256 * 256 * 2),  # images of few channels
        ((1 << 20, 64), 4, Minor(frozenset({1}), frozenset({0})), (1 << 20) * 128 * 4),  # rows that are gathered
        ((100,), 4, None, 128 * 4),
        ((3000,), 4, None, 3 * 1024 * 4),
        ((), 4, None, 4),
        ((0, 5), 4, None, 0),
    ],
)
def test_padded_bytes(shape, itemsize, dims, expected):
    assert padded_bytes(shape, itemsize, dims) == expected


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize("shape", [(7, 130, 3), (256, 1024), (3, 5), (16, 128, 8)])
def test_fewer_orders_never_take_less(shape, itemsize):
    free = padded_bytes(shape, itemsize)
    pairs = [minor(a, b) for a, b in itertools.combinations(range(len(shape)), 2)]
    assert min(padded_bytes(shape, itemsize, one) for one in pairs) == free >= 4 // 4 * itemsize
    assert padded_bytes((16, 128, 128), itemsize) == 16 * 128 * 128 * itemsize


def few_channels(x, w):
    numbers = ("NCHW", "OIHW", "NCHW")
    y = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)
    return jax.lax.conv_general_dilated(y, w, (1, 1), "SAME", dimension_numbers=numbers).sum()


def rows(table, at):
    found = jnp.sin(table)[at]
    return (found @ found.T[:, :256]).sum() + found.max()


def loop(x):
    def body(_, x):
        return jnp.sin(x) @ x

    return jax.lax.fori_loop(0, 4, body, x)


def arrays(*shapes):
    return [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]


PROGRAMS = {
    "few channels": (few_channels, arrays((16, 16, 128, 128), (16, 16, 3, 3))),
    "rows": (rows, [*arrays((COUNT, 48)), jax.ShapeDtypeStruct((4 * COUNT,), "int32")]),
    "loop": (loop, arrays((COUNT, 5, 5))),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_arrays_whose_order_is_given_take_more_than_their_elements(name):
    f, args = PROGRAMS[name]
    assert temporary_bytes(f, args, "tpu") > 2 * max(x.size for x in args) * 4


@pytest.mark.slow
@compilers.needs("libtpu")
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_compiler_for_tpus_stores_as_much(name):
    f, args = PROGRAMS[name]
    assert temporary_bytes(f, args, "tpu") == pytest.approx(compiled_temporary_bytes(f, args, "v5p:2x2x2"), rel=0.1)


def test_reflections_are_stored_by_columns():
    """A column of a tall matrix is along the lanes: 13 columns take no more than 16, 128 if they were rows."""
    x = jax.ShapeDtypeStruct((512, 1024, 13), jnp.float32)
    found = temporary_bytes(lambda x: jnp.linalg.qr(x, mode="r").sum(), [x], "tpu")
    assert padded_bytes(x.shape, 4, Minor(frozenset({1}), frozenset({2}))) == 4 * 512 * 1024 * 16
    assert found < 2 * 4 * 512 * 1024 * 16
