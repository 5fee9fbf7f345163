"""The table of compiled collectives against programs compiled here."""

from typing import get_args

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import sharding
from sharding import P
from sharding.cost import KINDS, Lowered, lower_collective, read_compiled
from sharding.hardware import Platform

SIZES = {"data": 2, "tensor": 4}
DTYPES = ["bfloat16", "float16", "float32", "int8", "uint8", "int16", "uint16", "int32", "uint32", "bool", "complex64"]
NARROW = ["float8_e4m3fn", "float8_e5m2"]
RARE = ["float8_e4m3", "float8_e3m4", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3b11fnuz", "float8_e8m0fnu"]

# One operand each, of different shapes, so that XLA combines none; shape in, shape whose bytes count.
BY_HAND = {
    "all-reduce": (lambda x: lax.psum(x, "tensor"), (8, 4), (8, 4)),
    "all-gather": (lambda x: lax.all_gather(x, "tensor", tiled=True), (8, 5), (32, 5)),
    "reduce-scatter": (lambda x: lax.psum_scatter(x, "tensor", tiled=True), (8, 6), (8, 6)),
    "all-to-all": (lambda x: lax.all_to_all(x, "tensor", 0, 0, tiled=True), (8, 7), (8, 7)),
    "collective-permute": (lambda x: lax.ppermute(x, "tensor", [(0, 1), (1, 0)]), (8, 9), (8, 9)),
}
BY_PARTITIONER = {
    "all-gather": (P("tensor"), P(), (8, 5), (8, 5)),
    "all-to-all": (P("tensor"), P(None, "tensor"), (8, 8), (2, 32 // 4)),
    "collective-permute": (P("data"), P("tensor"), (8, 9), (2, 9)),
}


def num_bytes(shape, dtype):
    return jnp.dtype(dtype).itemsize * jnp.zeros(shape, bool).size


def found(f, dtype, *shapes):
    """The compiled collectives of a program, sorted."""
    with sharding.mesh(SIZES):
        compiled = jax.jit(f).lower(*[jax.ShapeDtypeStruct(s, dtype) for s in shapes]).compile()
    return sorted(Lowered(c.kind, c.dtype, c.result_bytes) for c in read_compiled(compiled).collectives)


def by_hand(dtype):
    if dtype == "bool":  # JAX itself sums bools as integers
        kinds = {k: v for k, v in BY_HAND.items() if k != "reduce-scatter"}
        return kinds | {"all-reduce": (lambda x: lax.pmax(x, "tensor"), *BY_HAND["all-reduce"][1:])}
    return BY_HAND


def check_by_hand(dtype):
    kinds = by_hand(dtype)

    def all_kinds(*args):
        return [f(x) for (f, *_), x in zip(kinds.values(), args, strict=True)]

    f = jax.shard_map(all_kinds, mesh=None, in_specs=P(), out_specs=P(), check_vma=False)
    written = {
        kind: lower_collective("cpu", kind, dtype, num_bytes(counted, dtype), is_manual=True)
        for kind, (_, _, counted) in kinds.items()
    }
    assert found(f, dtype, *[shape for _, shape, _ in kinds.values()]) == sorted(written.values())
    assert [row.kind for row in written.values()] == list(kinds)


def check_by_partitioner(dtype):
    def moved(*args):
        steps = zip(BY_PARTITIONER.values(), args, strict=True)
        return [lax.with_sharding_constraint(lax.with_sharding_constraint(x, a), b) for (a, b, *_), x in steps]

    written = [lower_collective("cpu", k, dtype, num_bytes(c, dtype)) for k, (*_, c) in BY_PARTITIONER.items()]
    assert found(moved, dtype, *[shape for _, _, shape, _ in BY_PARTITIONER.values()]) == sorted(written)


def check_a_split_sum(dtype):
    def f(x, y):
        x, y = lax.with_sharding_constraint(x, P(None, "tensor")), lax.with_sharding_constraint(y, P("tensor"))
        return lax.with_sharding_constraint(x @ y, P("tensor"))

    written = lower_collective("cpu", "reduce-scatter", dtype, num_bytes((16, 24), dtype))
    assert found(f, dtype, (16, 8), (8, 24)) == [written]
    assert written.kind == "all-reduce"


@pytest.mark.parametrize("dtype", DTYPES + NARROW)
def test_every_kind_on_cpu(dtype):
    check_by_hand(dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", RARE)
def test_every_kind_of_a_rare_type_on_cpu(dtype):
    check_by_hand(dtype)
    check_by_partitioner(dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int8", "bool"])
def test_partitioner_collectives_on_cpu(dtype):
    check_by_partitioner(dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int8"])
def test_a_reduce_scatter_by_the_partitioner_is_an_all_reduce_and_a_slice_on_cpu(dtype):
    check_a_split_sum(dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", sorted({*DTYPES, *NARROW} - {"bool"}))
def test_partitioner_collectives_of_every_type_on_cpu(dtype):
    check_by_partitioner(dtype)
    check_a_split_sum(dtype)


def test_rows_of_other_backends():
    assert lower_collective("tpu", "all-gather", "bfloat16", 64) == ("all-gather", "bfloat16", 64)
    assert lower_collective("tpu", "reduce-scatter", "bfloat16", 64) == ("reduce-scatter", "bfloat16", 64)
    assert lower_collective("tpu", "all-reduce", "float16", 64) == ("all-reduce", "uint32", 64)
    assert lower_collective("tpu", "reduce-scatter", "int8", 64, is_manual=True) == ("all-reduce", "uint32", 64)
    assert lower_collective("gpu", "all-reduce", "int16", 64) == ("all-reduce", "int32", 128)
    assert lower_collective("gpu", "reduce-scatter", "bfloat16", 64) == ("reduce-scatter", "bfloat16", 64)


@pytest.mark.parametrize("backend", get_args(Platform))
@pytest.mark.parametrize("kind", KINDS)
def test_float32_is_unchanged(backend, kind):
    assert lower_collective(backend, kind, "float32", 8, is_manual=True) == (kind, "float32", 8)
