"""Safetensors files: written from and read onto any mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from sharding import ShardingError, checkpoint


def tree() -> dict:
    bits = jax.random.normal(jax.random.key(0), (16, 8))
    return {
        "blocks": {"0": {"w": bits, "b": bits[0].astype(jnp.bfloat16)}},
        "half": bits.astype(jnp.float16),
        "ints": jnp.arange(5, dtype=jnp.int8),
        "mask": bits[0] > 0,
        "scalar": jnp.float32(3),
    }


def shapes(sizes: tuple[int, ...]) -> dict:
    """The abstract tree on a mesh, with its matrices sharded over the axes."""
    names = ("data", "tensor")[: len(sizes)]
    types = (AxisType.Auto,) * len(sizes)
    mesh = jax.make_mesh(sizes, names, axis_types=types, devices=jax.devices()[: int(np.prod(sizes))])

    def shape(leaf: jax.Array) -> jax.ShapeDtypeStruct:
        spec = P(*names) if leaf.ndim == 2 else P()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(shape, tree())


def assert_equal(a: dict, b: dict) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("sizes", [(2, 4), (8,), (1,)], ids=str)
def test_read_onto_any_mesh(sizes, tmp_path):
    names = checkpoint.write_tensors(tree(), tmp_path / "x.safetensors")
    assert names == ["blocks/0/b", "blocks/0/w", "half", "ints", "mask", "scalar"]
    read = checkpoint.read_tensors(tmp_path / "x.safetensors", shapes(sizes))
    assert_equal(read, tree())
    jax.tree.map(lambda leaf, like: leaf.sharding == like.sharding or pytest.fail(str(leaf)), read, shapes(sizes))


def test_file_does_not_depend_on_the_mesh(tmp_path):
    checkpoint.write_tensors(tree(), tmp_path / "one")
    sharded = checkpoint.read_tensors(tmp_path / "one", shapes((2, 4)))
    checkpoint.write_tensors(sharded, tmp_path / "eight")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "eight").read_bytes()


def test_readable_by_the_safetensors_package(tmp_path):
    from safetensors.numpy import load_file

    column_major = jnp.asarray(np.asfortranarray(np.arange(6.0, dtype=np.float32).reshape(2, 3)))
    checkpoint.write_tensors(tree() | {"f": column_major}, tmp_path / "x")
    tensors = load_file(tmp_path / "x")
    np.testing.assert_array_equal(tensors["f"], np.arange(6.0).reshape(2, 3))
    assert str(tensors["blocks/0/b"].dtype) == "bfloat16"
    np.testing.assert_array_equal(tensors["blocks/0/b"], tree()["blocks"]["0"]["b"])


def test_without_a_structure(tmp_path):
    checkpoint.write_tensors(tree(), tmp_path / "x")
    assert_equal(checkpoint.read_tensors(tmp_path / "x"), checkpoint.named_leaves(tree()))


def test_exported_from_a_checkpoint(tmp_path):
    checkpoint.save(tmp_path / "run", 3, {"params": tree(), "step": jnp.int32(3)}).wait()
    names = checkpoint.export_tensors(tmp_path / "run", tmp_path / "x")
    assert "blocks/0/w" in names and "step" not in names
    assert_equal(checkpoint.read_tensors(tmp_path / "x", shapes((4, 2))), tree())


def test_one_error_lists_all_differences(tmp_path):
    zeros = {"a": jnp.zeros(3), "b": jnp.zeros(3), "c": jnp.zeros(3)}
    checkpoint.write_tensors(zeros, tmp_path / "x")
    like = {"a": jnp.zeros(4), "b": jnp.zeros(3, jnp.bfloat16), "d": jnp.zeros(1)}
    with pytest.raises(ShardingError, match="tensors with the requested names, shapes and dtypes") as caught:
        checkpoint.read_tensors(tmp_path / "x", like)
    assert caught.value.found == (
        "d: not in the file",
        "c: only in the file",
        "a: in the file float32[3], requested float32[4]",
        "b: in the file float32[3], requested bfloat16[3]",
    )


@pytest.mark.parametrize(
    "content", [None, b"", b"not safetensors", "cut"], ids=["missing", "empty", "other", "truncated"]
)
def test_invalid_file(content, tmp_path):
    path = tmp_path / "x"
    if content == "cut":
        checkpoint.write_tensors(tree(), path)
        path.write_bytes(path.read_bytes()[:-1])
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(ShardingError, match="a complete safetensors file"):
        checkpoint.read_tensors(path)


def test_missing_directory(tmp_path):
    with pytest.raises(ShardingError, match="required: a writable file"):
        checkpoint.write_tensors(tree(), tmp_path / "none" / "x")


def test_random_keys_are_rejected(tmp_path):
    with pytest.raises(ShardingError, match="k: random keys"):
        checkpoint.write_tensors({"k": jax.random.key(0)}, tmp_path / "x")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "dtype",
    "bool int8 uint32 float16 bfloat16 float32 complex64 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz "
    "float8_e8m0fnu".split(),
)
def test_every_type_of_the_format_is_read_back(dtype, tmp_path):
    values = np.arange(24).reshape(8, 3).astype(jnp.dtype(dtype))
    tree = {"x": jnp.asarray(values), "none": jnp.zeros((0, 3), dtype), "scalar": jnp.ones((), dtype)}
    checkpoint.write_tensors(tree, tmp_path / "x.safetensors")
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh, P("data") if x.shape == (8, 3) else P())
        ),
        tree,
    )
    for found in (
        checkpoint.read_tensors(tmp_path / "x.safetensors"),
        checkpoint.read_tensors(tmp_path / "x.safetensors", like),
    ):
        assert {name: (x.shape, x.dtype) for name, x in found.items()} == {
            name: (x.shape, x.dtype) for name, x in tree.items()
        }
        assert np.asarray(found["x"]).tobytes() == values.tobytes()
        assert np.asarray(found["scalar"]).tobytes() == np.ones((), jnp.dtype(dtype)).tobytes()


def test_a_type_that_jax_lacks(tmp_path):
    header = b'{"x":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]}}'
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(3))
    with pytest.raises(ShardingError, match="x: F6_E2M3"):
        checkpoint.read_tensors(tmp_path / "x.safetensors")
