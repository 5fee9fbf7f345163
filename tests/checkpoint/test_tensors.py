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
    """The tree's shapes on a mesh; the large ones are split by its axes."""
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


def test_written_from_a_mesh_the_file_is_the_same(tmp_path):
    checkpoint.write_tensors(tree(), tmp_path / "one")
    spread = checkpoint.read_tensors(tmp_path / "one", shapes((2, 4)))
    checkpoint.write_tensors(spread, tmp_path / "eight")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "eight").read_bytes()


def test_other_readers_understand_it(tmp_path):
    from safetensors.numpy import load_file

    column_major = jnp.asarray(np.asfortranarray(np.arange(6.0, dtype=np.float32).reshape(2, 3)))
    checkpoint.write_tensors(tree() | {"f": column_major}, tmp_path / "x")
    there = load_file(tmp_path / "x")
    np.testing.assert_array_equal(there["f"], np.arange(6.0).reshape(2, 3))
    assert str(there["blocks/0/b"].dtype) == "bfloat16"
    np.testing.assert_array_equal(there["blocks/0/b"], tree()["blocks"]["0"]["b"])


def test_without_a_structure(tmp_path):
    checkpoint.write_tensors(tree(), tmp_path / "x")
    assert_equal(checkpoint.read_tensors(tmp_path / "x"), checkpoint.named_leaves(tree()))


def test_exported_from_a_checkpoint(tmp_path):
    checkpoint.save(tmp_path / "run", 3, {"params": tree(), "step": jnp.int32(3)}).wait()
    names = checkpoint.export_tensors(tmp_path / "run", tmp_path / "x")
    assert "blocks/0/w" in names and "step" not in names
    assert_equal(checkpoint.read_tensors(tmp_path / "x", shapes((4, 2))), tree())


def test_every_difference_is_listed(tmp_path):
    zeros = {"a": jnp.zeros(3), "b": jnp.zeros(3), "c": jnp.zeros(3)}
    checkpoint.write_tensors(zeros, tmp_path / "x")
    asked = {"a": jnp.zeros(4), "b": jnp.zeros(3, jnp.bfloat16), "d": jnp.zeros(1)}
    with pytest.raises(ShardingError, match="names, shapes and dtypes") as caught:
        checkpoint.read_tensors(tmp_path / "x", asked)
    assert caught.value.there == (
        "d: not in the file",
        "c: in the file alone",
        "a: in the file float32[3], asked as float32[4]",
        "b: in the file float32[3], asked as bfloat16[3]",
    )


@pytest.mark.parametrize(
    "content", [None, b"", b"nothing of the kind", "cut"], ids=["missing", "empty", "other", "cut"]
)
def test_a_file_that_is_none(content, tmp_path):
    path = tmp_path / "x"
    if content == "cut":
        checkpoint.write_tensors(tree(), path)
        path.write_bytes(path.read_bytes()[:-1])
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(ShardingError, match="whole safetensors file"):
        checkpoint.read_tensors(path)


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(ShardingError, match="must be one to write"):
        checkpoint.write_tensors(tree(), tmp_path / "none" / "x")


def test_keys_are_no_tensors(tmp_path):
    with pytest.raises(ShardingError, match="k: random keys"):
        checkpoint.write_tensors({"k": jax.random.key(0)}, tmp_path / "x")
    assert not list(tmp_path.iterdir())
