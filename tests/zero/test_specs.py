"""Which dim an axis splits."""

import jax
import jax.numpy as jnp
import pytest

import sharding
from sharding import P, ShardingError, zero


def shape(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


@pytest.fixture
def mesh():
    with sharding.mesh(data=4, tensor=2):
        yield


@pytest.mark.parametrize(
    ("dims", "like", "wanted"),
    [
        ((8, 16), P(), P(None, "data")),  # the longest
        ((16, 6), P(), P("data", None)),  # that it divides
        ((8, 16), P(None, "tensor"), P("data", "tensor")),  # that nothing splits yet
        ((6, 16), P(None, "tensor"), P(None, ("tensor", "data"))),  # or a part of it
        ((6, 12), P(None, "tensor"), None),
        ((6, 4), P(None, "tensor"), None),
        ((3,), P(), None),
        ((), P(), None),
        ((8, 16), P("data"), P("data")),  # it is there already
    ],
)
def test_dims(mesh, dims, like, wanted):
    found = zero.specs({"w": shape(*dims)}, stage=3, like={"w": like})
    assert found.params["w"] == (like if wanted is None else wanted)
    assert (found.whole == {}) == (wanted is not None)


def test_stages(mesh):
    params = {"w": shape(8, 16), "odd": shape(3, 5, dtype=jnp.bfloat16)}
    split, own = {"w": P(None, "data"), "odd": P()}, {"w": P(), "odd": P()}
    for stage, wanted in {1: (own, own), 2: (own, split), 3: (split, split)}.items():
        found = zero.specs(params, stage=stage)
        assert (found.params, found.gradients, found.state) == (*wanted, split)
        assert found.whole == {"odd": 30}


def test_arrays_say_how_they_lie(mesh):
    w = sharding.put(jnp.zeros((8, 16)), P("tensor"))
    assert zero.specs([w]).params == [P("tensor", "data")]


def test_what_can_not_be():
    with pytest.raises(ShardingError, match="no mesh"):
        zero.specs([shape(4)])
    with sharding.mesh(data=8):
        with pytest.raises(ShardingError, match=r"the mesh data=8[\s\S]*an axis 'fsdp'"):
            zero.specs([shape(4)], "fsdp")
        with pytest.raises(ShardingError, match="another axis"):
            zero.specs([shape(8)], replicas="data")
        with pytest.raises(ShardingError, match="one of 1, 2, 3"):
            zero.specs([shape(8)], stage=0)
