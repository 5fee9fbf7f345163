"""Sub-axes: a reshape that divides an axis between two dims needs no communication, also when compiled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from support import partitioned_ops

import sharding
from sharding import P
from sharding.cost import read_compiled
from sharding.rewrite.sub_axes import refine
from sharding.spec import Dim, Spec

MESH = AbstractMesh((2, 8), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


def spec(*dims):
    return Spec(dims=tuple(Dim(axes=axes) for axes in dims))


@pytest.mark.parametrize(
    "dims, axes, expected",
    [
        ([("data",), ()], {"data": 2, "tensor": 8}, [("data",), ()]),
        (
            [(("tensor", 1, 2),), (("tensor", 2, 4),)],
            {"data": 2, "tensor:0": 2, "tensor:1": 4},
            [("tensor:0",), ("tensor:1",)],
        ),
        (
            [(("tensor", 2, 2), "data"), (("tensor", 1, 2),)],
            {"data": 2, "tensor:0": 2, "tensor:1": 2, "tensor:2": 2},
            [("tensor:1", "data"), ("tensor:0",)],
        ),
        (
            [(("tensor", 1, 2),), (("tensor", 2, 2),)],
            {"data": 2, "tensor:0": 2, "tensor:1": 2, "tensor:2": 2},
            [("tensor:0",), ("tensor:1",)],
        ),
    ],
)
def test_refine(dims, axes, expected):
    mesh, found = refine(MESH, spec(*dims))
    assert dict(mesh.shape) == axes
    assert found.axes == tuple(expected)
    assert set(mesh.axis_types) == {AxisType.Auto}


def heads(x):
    """Reshapes features sharded over 8 to 2 heads of 4, and uses them."""
    y = sharding.annotate(x.reshape(16, 2, 4, 4), name="heads")
    return jnp.sin(y).transpose(1, 2, 0, 3).sum(axis=3)


SIZES = {"data": 1, "tensor": 8}


def test_an_axis_over_two_dims_needs_no_communication():
    x = np.arange(16 * 32, dtype=np.float32).reshape(16, 32)
    with sharding.mesh(SIZES):
        f = sharding.jit(lambda x: heads(x).reshape(8, 16), in_shardings=P(None, "tensor"))
        completion = f.complete(x)
        facts = read_compiled(f.lower(x).compile())
        found = f(x)
    value = completion.assignment.specs[completion.value("heads")]
    assert value.axes[1:3] == ((("tensor", 1, 2),), (("tensor", 2, 4),))
    assert not facts.collectives
    assert found.sharding.spec == P("tensor")
    np.testing.assert_allclose(found, jax.jit(lambda x: heads(x).reshape(8, 16))(x), rtol=1e-6)


def test_gradients_and_batching_of_such_a_program():
    x = np.arange(16 * 32, dtype=np.float32).reshape(16, 32) / 100
    with sharding.mesh(SIZES):
        f = sharding.jit(lambda x: jnp.sum(heads(x) ** 2), in_shardings=P(None, "tensor"))
        gradient = jax.jit(jax.grad(f))(x)
        batched = jax.jit(jax.vmap(f))(np.stack([x, 2 * x]))
    plain = lambda x: jnp.sum(heads(x) ** 2)  # noqa: E731
    np.testing.assert_allclose(gradient, jax.grad(plain)(x), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(batched, [plain(x), plain(2 * x)], rtol=1e-5)


mapped = partitioned_ops.elementwise(jnp.cos, "... -> ...")


@pytest.mark.parametrize(
    "f",
    [
        lambda x: mapped(x.reshape(2, 4, 3)),
        lambda x: mapped(x.reshape(8, 3)[:6]),  # of unequal shards
        lambda x: sharding.annotate(mapped(sharding.annotate(x, P())), P("tensor")),
        lambda x: lax.scan(lambda c, _: (mapped(c), None), x.reshape(2, 4, 3), length=2)[0],
    ],
    ids=["operand", "unequal", "result", "carry"],
)
def test_a_custom_partitioning_takes_equal_shards_along_whole_axes(f):
    x = np.arange(24, dtype=np.float32).reshape(8, 3)
    with sharding.mesh(SIZES):
        step = sharding.jit(f, in_shardings=P("tensor"))
        assert step.complete(x).verify(step.lower(x).compile()).agrees
        np.testing.assert_allclose(step(x), jax.jit(f)(x), rtol=1e-6)
