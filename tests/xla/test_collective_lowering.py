"""The table of compiled collectives against programs compiled here."""

from typing import get_args

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from support.compilers import COMPILERS, devices

import sharding
from sharding import P
from sharding.cost import KINDS, Lowered, lower_collective, read_compiled
from sharding.hardware import Platform
from sharding.xla.collective_lowering import is_scattered_by_all_reduce

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
    assert lower_collective("tpu", "all-reduce", "float16", 1024) == ("all-reduce", "uint32", 1024)
    assert lower_collective("tpu", "all-reduce", "int8", 600) == ("all-reduce", "uint32", 1024)
    assert lower_collective("tpu", "all-reduce", "bool", 1) == ("all-reduce", "uint32", 4)
    assert lower_collective("tpu", "reduce-scatter", "int8", 512, is_manual=True) == ("all-reduce", "uint32", 512)
    assert lower_collective("gpu", "all-reduce", "int16", 64) == ("all-reduce", "int32", 128)
    assert lower_collective("gpu", "reduce-scatter", "bfloat16", 64) == ("reduce-scatter", "bfloat16", 64)


@pytest.mark.parametrize("backend", get_args(Platform))
@pytest.mark.parametrize("kind", KINDS)
def test_float32_is_unchanged(backend, kind):
    assert lower_collective(backend, kind, "float32", 8, is_manual=True) == (kind, "float32", 8)


SHARDS = [
    ((512, 64), 1, "bfloat16", False),  # the long dim lies along the lanes
    ((512, 128), 1, "bfloat16", True),  # half a tile of 32-bit words
    ((512, 128), 1, "float32", False),
    ((512, 256), 1, "bfloat16", False),
    ((512, 384), 1, "bfloat16", True),
    ((4, 512), 0, "float32", True),
    ((8, 512), 0, "float32", False),
    ((8, 512), 0, "bfloat16", False),
    ((16, 128), 0, "bfloat16", False),
    ((4, 8, 256), 1, "bfloat16", True),
    ((4, 8, 256), 1, "float32", False),
    ((4, 64, 64), 2, "float32", True),
    ((4, 96, 64), 2, "float32", False),
    ((64, 4, 32), 0, "float32", True),
    ((128, 4, 32), 0, "float32", False),
    ((128, 4, 32), 0, "bfloat16", True),
    ((64, 4, 64), 0, "bfloat16", False),
    ((4792, 512), 1, "float32", True),  # 599 tiles of rows are too many for one block, and a prime number
    ((4800, 512), 1, "float32", False),
    ((4, 4792, 256), 2, "float32", True),
]
"""Shape of a device's shard, the scattered dim, the dtype, and whether a TPU all-reduces and slices."""


@pytest.mark.parametrize(("shape", "dim", "dtype", "expected"), SHARDS)
def test_reduce_scatters_of_whole_tiles_on_tpu(shape, dim, dtype, expected):
    whole, itemsize = [2 * n if d == dim else n for d, n in enumerate(shape)], jnp.dtype(dtype).itemsize
    assert is_scattered_by_all_reduce("tpu", whole, dim, 2, itemsize) == expected
    assert not is_scattered_by_all_reduce("gpu", whole, dim, 2, itemsize)


def test_reduce_scatters_of_products_on_tpu():
    assert is_scattered_by_all_reduce("tpu", (4096,), 0, 2, 4)
    assert is_scattered_by_all_reduce("tpu", (2, 8, 16, 256), 1, 2, 4)
    assert is_scattered_by_all_reduce("tpu", (8, 16, 256), 0, 4, 4, (2, 0))
    assert not is_scattered_by_all_reduce("tpu", (8, 16, 256), 1, 4, 4, (2, 0))


@pytest.mark.parametrize(("backend", "described"), [COMPILERS["tpu"]])
@pytest.mark.parametrize(("shape", "dim", "dtype", "expected"), SHARDS)
def test_reduce_scatters_as_compiled(shape, dim, dtype, expected, backend, described):
    whole = [4 * n if d == dim else n for d, n in enumerate(shape)]
    with sharding.mesh(a=4, b=2, devices=devices(described)):
        spec = P(*("a" if d == dim else None for d in range(len(shape))))

        def f(x, y):
            return jnp.einsum("k...a,kb->...ab", x, y).astype(dtype) + 1

        args = [jax.ShapeDtypeStruct(s, dtype) for s in ((2048, *whole[:-1]), (2048, whole[-1]))]
        jitted = sharding.jit(f, in_shardings=P("a"), out_shardings=spec)
        compiled = read_compiled(jitted.lower(*args).compile()).by_kind()
        assert ("reduce-scatter" not in compiled) == expected
        assert jitted.complete(*args).communication().lowered(backend).by_kind() == compiled
