"""Checksums: the published formula, the same on any mesh, another one for any change of order or of a bit."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support.peak_memory import newest_jax_only

from sharding import checkpoint
from sharding.checkpoint import array_names, corruption
from sharding.checkpoint.corruption import checksums


def checksum(array: jax.typing.ArrayLike) -> int:
    return checksums({"x": jnp.asarray(array)})["x"]


def words(array: np.ndarray) -> np.ndarray:
    """The bits of each element in row-major order, as numbers of at most 32 bits: real before imaginary, low first."""
    if array.dtype.kind == "c":
        array = np.stack([array.real, array.imag], -1)
    flat = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
    width = min(array.dtype.itemsize, 4)
    return flat.reshape(-1, width).astype(np.uint64) @ (1 << np.arange(0, 8 * width, 8, dtype=np.uint64))


def reference(array: np.ndarray) -> int:
    """The sum of every word times an odd number made of its position, modulo 2^32."""
    bits = words(array)
    at = np.arange(len(bits), dtype=np.uint64)
    factor = ((at * np.uint64(2654435761)) % np.uint64(2**32) ^ (at >> np.uint64(15))) | np.uint64(1)
    return int(sum((bits * factor % np.uint64(2**32)).tolist()) % 2**32)


SHAPES = [(), (0, 3), (2, 3, 4)]


@pytest.mark.parametrize("dtype", ["bool", "int8", "bfloat16", "float32", "complex64"])
def test_checksums_are_those_of_checkpoints_on_disk(dtype: str):
    """Another formula would reject every checkpoint that exists."""
    random = np.random.default_rng(0)
    for shape in SHAPES:
        array = np.asarray(jnp.asarray(100 * random.standard_normal(shape)).astype(dtype))
        assert checksum(array) == reference(array), shape


@pytest.mark.parametrize("dtype", ["bool", "bfloat16", "float32", "complex64"])
def test_parts_of_a_large_array(dtype: str):
    size = 2 * corruption.PART + 5
    array = np.asarray(jnp.asarray(np.random.default_rng(0).integers(0, 256, (5, size // 5 + 1))).astype(dtype))
    assert checksum(array) == reference(array)


def test_positions_beyond_two_bytes():
    array = np.random.default_rng(0).integers(0, 256, (3, 40_000), np.uint8)
    assert checksum(array) == reference(array)


def rearranged(array: np.ndarray) -> list[np.ndarray]:
    """The same elements in the same shape at other places."""
    swapped_rows, swapped_elements = array.copy(), array.copy()
    swapped_rows[[0, 1]] = array[[1, 0]]
    swapped_elements.flat[[0, 1]] = array.flat[[1, 0]]
    found = [swapped_rows, swapped_elements]
    for order in itertools.permutations(range(array.ndim)):
        found += [array.transpose(order).reshape(array.shape)] if order != tuple(range(array.ndim)) else []
        found += [np.reshape(array, array.shape[::-1], order="F").transpose()] if array.ndim > 1 else []
    for dim in range(array.ndim):
        found += [np.flip(array, dim), np.roll(array, 1, dim)]
    return [other for other in found if not np.array_equal(other, array)]


@pytest.mark.parametrize("shape", [(6,), (4, 4), (3, 5), (3, 3, 3), (2, 3, 4)], ids=str)
def test_another_order_has_another_checksum(shape: tuple[int, ...]):
    array = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    before = checksum(array)
    others = rearranged(array)
    assert len(others) >= 2 * len(shape)
    assert before not in [checksum(other) for other in others]


def test_every_bit_counts():
    array = np.random.default_rng(0).integers(0, 2**16, (3, 5), np.uint16)
    flipped = []
    for place, bit in itertools.product(range(array.size), range(16)):
        other = array.copy()
        other.flat[place] ^= np.uint16(1 << bit)
        flipped.append(checksum(other))
    assert checksum(array) not in flipped


def test_checksums_do_not_depend_on_the_mesh():
    array = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    specs = [P(), P("data"), P(None, "tensor"), P(("tensor", "data")), P("data", "tensor")]
    sharded = {str(spec): jax.device_put(array, NamedSharding(mesh, spec)) for spec in specs}
    assert set(checksums(sharded).values()) == {reference(array)}


@pytest.mark.parametrize("dtype", ["float32", "uint8", "bfloat16", "complex64"])
def test_shards_of_several_parts(dtype: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(corruption, "PART", 7)
    array = np.asarray(jnp.asarray(np.random.default_rng(0).integers(0, 256, (8, 4, 12))).astype(dtype))
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    specs = [P("a"), P(None, "b"), P(("b", "a")), P("a", None, "b"), P(None, None, "a")]
    sharded = {str(spec): jax.device_put(array, NamedSharding(mesh, spec)) for spec in specs}
    assert set(checksums(sharded | {"one": jnp.asarray(array)}).values()) == {reference(array)}


@newest_jax_only
def test_memory_of_one_part():
    """Replicas and narrow elements, too."""
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, P("b"))
    array = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16, sharding=sharding)
    compiled = corruption._of_shards(sharding).lower(array).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= 16 * corruption.PART


DTYPES = (
    "bool int4 uint4 int2 uint2 int8 uint8 int16 bfloat16 float16 float4_e2m1fn float8_e4m3 float32 int32 complex64"
)


@pytest.mark.parametrize("dtype", DTYPES.split())
def test_stored_elements_are_restored(dtype: str):
    """Negative ones too."""
    array = jnp.asarray(np.random.default_rng(0).permutation(24) - 12.0).reshape(4, 6).astype(dtype)
    stored = array_names.stored(array)
    shape = array_names.stored_shape(array)
    assert (stored.shape, stored.dtype) == (shape.shape, shape.dtype)
    restored = array_names.as_saved(stored, array, None)
    assert restored.dtype == array.dtype
    np.testing.assert_array_equal(restored, array)


def test_arrays_of_another_checkpoint_are_told(tmp_path):
    """As after a botched copy: equal names, shapes and sizes, but transposed."""
    array = jnp.asarray(np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32))
    with checkpoint.Saver(tmp_path) as saver:
        saver.save(1, {"w": array, "b": array[0]})
        saver.save(2, {"w": array.T, "b": array[0]})
    (tmp_path / "1" / "arrays").rename(tmp_path / "aside")
    (tmp_path / "2" / "arrays").rename(tmp_path / "1" / "arrays")
    (tmp_path / "aside").rename(tmp_path / "2" / "arrays")
    assert checkpoint.verify(tmp_path) == {2: "checksum mismatch: w", 1: "checksum mismatch: w"}


def test_an_array_in_the_memory_of_the_host_has_the_same():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    array = np.arange(64, dtype=np.float32).reshape(8, 8)
    host = jax.device_put(array, NamedSharding(mesh, P("data"), memory_kind="pinned_host"))
    assert checksums({"x": host})["x"] == checksum(array)
