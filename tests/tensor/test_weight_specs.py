"""Tensor-parallel specs by parameter role."""

import jax
import jax.numpy as jnp
import pytest
from support import tensor_parallel_reference

import sharding
from sharding import P, ShardingError, tensor


@pytest.fixture(autouse=True)
def mesh():
    with sharding.mesh(data=2, tensor=4):
        yield


def shape(*dims):
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def test_roles():
    found = tensor.specs(tensor_parallel_reference.params(), tensor_parallel_reference.ROLES)
    assert found["table"] == P("tensor", None)
    assert found["blocks"] == [
        {
            "qkv": P(None, "tensor", None, None),
            "out": P("tensor", None, None),
            "out_bias": P(),
            "w1": P(None, "tensor"),
            "b1": P("tensor"),
            "w2": P("tensor", None),
            "b2": P(),
        }
    ]


def test_stacked_layers_lead():
    params = {"up": shape(3, 8, 32), "up_bias": shape(3, 32), "down": shape(3, 32, 8)}
    found = tensor.specs(params, {"up": "column", "up_bias": "column_bias", "down": "row"})
    assert found == {"up": P(None, None, "tensor"), "up_bias": P(None, "tensor"), "down": P(None, "tensor", None)}


def test_dims_from_the_front_and_from_the_back():
    params = {"qkv": shape(8, 4, 6), "out": shape(4, 6, 8)}
    assert tensor.specs(params, {"qkv": -2, "out": 0}) == {
        "qkv": P(None, "tensor", None),
        "out": P("tensor", None, None),
    }


def test_the_first_of_several_roles_wins():
    params = {"first": {"up": shape(8, 8)}, "second": {"up": shape(8, 8)}}
    roles = {"first/up": "row", "up": "column"}
    expected = {"first": {"up": P("tensor", None)}, "second": {"up": P(None, "tensor")}}
    assert tensor.specs(params, roles) == expected
    c = sharding.jit(lambda params: jax.tree.map(jnp.sin, tensor.split(params, roles))).complete(params)
    assert [c.spec(f"out/{name}/up") for name in params] == [P("tensor"), P(None, "tensor")]
    assert not c.conflicts


def test_a_model_without_annotations():
    def loss(params, x):
        params = tensor.split(params, {"up": "column", "down": "row"})
        return jnp.mean(jax.nn.gelu(x @ params["up"]) @ params["down"])

    params = {"up": shape(8, 32), "bias": shape(8), "down": shape(32, 8)}
    step = sharding.jit(jax.grad(loss), in_shardings=(None, P("data")))
    completion = step.complete(params, shape(16, 8))
    assert completion.in_shardings[0] == {"up": P(None, "tensor"), "bias": P(), "down": P("tensor")}


@pytest.mark.parametrize(
    ("roles", "match"),
    [
        ({"up": "colum"}, r"'up': 'colum'[\s\S]*column, column_bias, row, vocabulary"),
        ({"dwon": "row"}, r"rule 'dwon'[\s\S]*no match among 4 paths[\s\S]*down"),
        ({"d*": "column", "down": "row"}, r"rule 'down'[\s\S]*'d\*' comes before[\s\S]*rule 'down' before 'd\*'"),
        ({"odd": "column"}, r"odd[\s\S]*6 = 1 x 4 \+ 2"),
        ({"bias": "row"}, r"rule 'bias'[\s\S]*bias has 1 dims, P\('tensor', None\) has 2"),
        ({"bias": "row", "up": 2}, "2 failures"),
    ],
)
def test_errors(roles, match):
    params = {"up": shape(8, 32), "down": shape(32, 8), "bias": shape(8), "odd": shape(8, 6)}
    with pytest.raises(ShardingError, match=match):
        tensor.specs(params, roles)
    with pytest.raises(ShardingError, match=match):
        tensor.split(params, roles)


def test_an_unknown_axis_is_an_error():
    with pytest.raises(ShardingError, match="a mesh axis 'model'"):
        tensor.specs({}, {}, axis="model")
