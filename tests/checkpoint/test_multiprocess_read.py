"""What is read at once."""

import jax
import pytest

from sharding import P
from sharding.checkpoint.multiprocess_read import _groups


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))


def groups(mesh, **sizes):
    """Names that are read at once, of float32 vectors: those of names that end with `s` are sharded."""
    specs = {name: P("x") if name.endswith("s") else P() for name in sizes}
    shapes = {
        name: jax.ShapeDtypeStruct((n,), "float32", sharding=jax.sharding.NamedSharding(mesh, specs[name]))
        for name, n in sizes.items()
    }
    return [list(group) for group in _groups(shapes)]


def test_replicated_arrays_are_read_in_groups_no_larger_than_the_largest(mesh):
    assert groups(mesh, a=64, b=40, c=24, d=8) == [["a"], ["b", "c"], ["d"]]


def test_sharded_arrays_are_read_together_first(mesh):
    assert groups(mesh, a=16, bs=800, c=8, ds=800) == [["bs", "ds"], ["a", "c"]]
    assert groups(mesh, as_=8, bs=8) == [["bs"], ["as_"]]


def test_no_group_is_empty(mesh):
    assert groups(mesh) == []
    assert groups(mesh, a=8) == [["a"]]
