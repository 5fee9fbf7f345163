"""The dim of each array that an axis shards."""

import re
import warnings

import jax
import jax.numpy as jnp
import optax
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
    ("dims", "like", "expected"),
    [
        ((8, 16), P(), P(None, "data")),  # the longest
        ((16, 6), P(), P("data", None)),  # that the axis divides
        ((8, 16), P(None, "tensor"), P("data", "tensor")),  # that is not sharded yet
        ((6, 16), P(None, "tensor"), P(None, ("tensor", "data"))),  # else one that is sharded
        ((6, 12), P(None, "tensor"), None),
        ((6, 4), P(None, "tensor"), None),
        ((3,), P(), None),
        ((), P(), None),
        ((8, 16), P("data"), P("data")),  # already sharded over the axis
    ],
)
def test_dims(mesh, dims, like, expected):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if expected is None else "error")
        found = zero.specs({"w": shape(*dims)}, stage=3, like={"w": like})
    assert found.params["w"] == (like if expected is None else expected)
    assert (found.whole == {}) == (expected is not None)


def test_stages(mesh):
    params = {"w": shape(8, 16), "odd": shape(3, 5, dtype=jnp.bfloat16)}
    sharded, own = {"w": P(None, "data"), "odd": P()}, {"w": P(), "odd": P()}
    for stage, expected in {1: (own, own), 2: (own, sharded), 3: (sharded, sharded)}.items():
        with pytest.warns(UserWarning, match=r"zero.specs\(axis='data'\): the axis divides no dim of odd \(30 bytes\)"):
            found = zero.specs(params, stage=stage)
        assert (found.params, found.gradients, found.state) == (*expected, sharded)
        assert found.whole == {"odd": 30}


@pytest.mark.parametrize("like", [None, {"w": P(None, "tensor"), "odd": P(), "b": P("tensor")}])
def test_split_shards_a_step_as_stage_3_places_it(mesh, like):
    params = {"w": shape(8, 16), "odd": shape(3, 5), "b": shape(16)}
    with pytest.warns(UserWarning, match="no dim of odd"):
        expected = zero.specs(params, stage=3, like=like).params
        found = sharding.jit(lambda params: zero.split(params, like=like)).complete(params).out_shardings

    for name, leaf in params.items():
        missing = [None] * len(leaf.shape)
        assert [*found[name], *missing][: len(missing)] == [*expected[name], *missing][: len(missing)]
    assert all("data" in str(expected[name]) for name in ("w", "b"))


def test_existing_shardings_are_the_default(mesh):
    w = sharding.put(jnp.zeros((8, 16)), P("tensor"))
    assert zero.specs([w]).params == [P("tensor", "data")]


def test_errors():
    with pytest.raises(ShardingError, match="no mesh"):
        zero.specs([shape(4)])
    with sharding.mesh(data=8):
        with pytest.raises(ShardingError, match=r"mesh axes data=8[\s\S]*a mesh axis 'fsdp'"):
            zero.specs([shape(4)], "fsdp")
        with pytest.raises(ShardingError, match="a replicas axis other than axis"):
            zero.specs([shape(8)], replicas="data")
        with pytest.raises(ShardingError, match="one of 1, 2, 3"):
            zero.specs([shape(8)], stage=0)


@pytest.mark.parametrize(
    ("like", "words"),
    [
        ({"w": P("model"), "b": P("model")}, r"spec of b[\s\S]*'model', which is not a mesh axis[\s\S]*spec of w"),
        ({"w": P(None, None, "tensor"), "b": P()}, "3 entries for 2 dims"),
        ({"w": P("tensor", "tensor"), "b": P()}, "'tensor' is used twice"),
        ({"w": P(), "b": ("tensor",)}, r"spec of b[\s\S]*required: a PartitionSpec"),
        ({"w": P()}, "1 specs for 2 parameters"),
        ({"w": P(), "b": None}, "1 specs for 2 parameters"),
    ],
)
def test_specs_that_do_not_fit_the_parameters(mesh, like, words):
    params = {"w": jnp.ones((8, 16)), "b": jnp.ones(16)}
    for use in (zero.specs, zero.split, lambda params, like: zero.shard(optax.sgd(0.1), like=like).init(params)):
        with pytest.raises(ShardingError, match=words) as caught:
            use(params, like=like)
        assert re.search(r"zero\.\w+\(axis=.data.\): ", str(caught.value))


def test_arrays_on_a_mesh_with_other_axes():
    with sharding.mesh(model=8):
        w = sharding.put(jnp.zeros((8, 16)), P("model"))
    with sharding.mesh(data=8), pytest.raises(ShardingError, match="'model', which is not a mesh axis"):
        zero.specs([w])


def test_parameters_that_stay_replicated_are_an_error_under_strict(mesh):
    params = {"w": shape(8, 16), "odd": shape(3, 5)}
    uses = (zero.specs, zero.split, lambda params, strict: zero.shard(optax.sgd(0.1), strict=strict).init(params))
    for use in uses:
        with pytest.raises(ShardingError, match=r"odd: the axis divides no dim; 60 bytes.*"):
            use(params, strict=True)
        assert use({"w": jnp.ones((8, 16))}, strict=True) is not None
