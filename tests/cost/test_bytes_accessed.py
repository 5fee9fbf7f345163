"""Bytes that ops read and write: what is renamed, generated, looked up and updated."""

import jax
import jax.numpy as jnp
import pytest

from sharding.cost import work
from sharding.cost.bytes_accessed import GENERATORS, RENAMES, SCATTERS, num_bytes


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def i32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def accessed(name, operands, results, **params):
    done = work(name, operands, results, params)
    assert done.num_bytes == done.read_bytes + done.written_bytes
    return done.read_bytes, done.written_bytes


@pytest.mark.parametrize(
    ("dtype", "each"),
    [
        ("int4", 0.5),
        ("uint4", 0.5),
        ("float4_e2m1fn", 0.5),
        ("int8", 1),
        ("bool", 1),
        ("bfloat16", 2),
        ("complex64", 8),
    ],
)
def test_bytes_of_an_array(dtype, each):
    assert num_bytes(jax.ShapeDtypeStruct((6, 4), jnp.dtype(dtype))) == 24 * each


def test_a_random_key_is_two_words():
    assert num_bytes(jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 3))) == 3 * 2 * 4


@pytest.mark.parametrize("name", sorted(RENAMES))
def test_a_renaming_op_moves_nothing(name):
    assert accessed(name, [f32(8, 4)], [f32(4, 8)]) == (0, 0)


@pytest.mark.parametrize("name", sorted(GENERATORS))
def test_a_generator_only_writes(name):
    assert accessed(name, [f32(2)], [f32(8, 4)]) == (0, 8 * 4 * 4)


def test_any_other_op_reads_its_operands_and_writes_its_results():
    assert accessed("sin", [f32(8, 4)], [f32(8, 4)]) == (128, 128)
    assert accessed("reduce", [f32(8, 4), i32(8, 4), f32(), i32()], [f32(8), i32(8)]) == (2 * 128 + 8, 64)


@pytest.mark.parametrize("name", ["slice", "dynamic_slice", "gather"])
def test_what_is_looked_up_is_read(name):
    assert accessed(name, [f32(100, 4), i32(3, 1)], [f32(3, 4)]) == (3 * 4 * 4 + 3 * 4, 3 * 4 * 4)
    # an element that is looked up again is in a cache: no more than the whole array is read
    assert accessed(name, [f32(2, 4), i32(30, 1)], [f32(30, 4)]) == (2 * 4 * 4 + 30 * 4, 30 * 4 * 4)


@pytest.mark.parametrize("name", SCATTERS)
@pytest.mark.parametrize("count", [1, 2])
def test_what_is_scattered_to_is_read_and_written(name, count):
    """Operands, indices, updates: the indices, the updates, and the elements in their place."""
    arrays = [f32(100, 4)] * count
    read, written = accessed(name, [*arrays, i32(3, 1), *[f32(3, 4)] * count], arrays)
    updates = count * 3 * 4 * 4
    assert (read, written) == (3 * 4 + 2 * updates, updates)


def test_an_update_in_place_reads_and_writes_itself_alone():
    assert accessed("dynamic_update_slice", [f32(100, 4), f32(2, 4), i32(), i32()], [f32(100, 4)]) == (32 + 8, 32)
