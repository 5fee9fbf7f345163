"""Reshards weigh the bytes that they send by the links of the axes."""

import jax
import jax.numpy as jnp
import pytest

import sharding
from sharding import P
from sharding.rewrite.reshard import chain, chain_cost
from sharding.spec import Dim, MeshSizes, Spec, byte_cost

SHAPE = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)


def added(x, y):
    return sharding.annotate(x + y, P(None, None), name="z")


@pytest.mark.parametrize("specs", [(P("node"), P("gpu")), (P("gpu"), P("node"))])
def test_the_large_gather_goes_over_the_fast_links(specs):
    with sharding.mesh(node=4, gpu=4, devices="h100:4x4"):
        ledger = sharding.jit(added, in_shardings=specs).complete(SHAPE, SHAPE).communication()
    assert [c.axes for c in ledger if c.kind == "all-gather"] == [("gpu",)]


def test_links_of_one_kind_are_equal():
    with sharding.mesh(node=4, gpu=4, devices=16):
        completion = sharding.jit(added, in_shardings=(P("node"), P("gpu"))).complete(SHAPE, SHAPE)
    assert completion.assignment.sizes.byte_costs == {}
    assert [c.axes for c in completion.communication() if c.kind == "all-gather"] == [("node",)]  # the first of equals


def test_costs_of_groups():
    sizes = MeshSizes({"node": 4, "gpu": 8}, {"node": 9.0})
    assert byte_cost(("gpu",), sizes) == 1 and byte_cost(("node",), sizes) == 9
    assert byte_cost(("node", "gpu"), sizes) == 2  # each GPU sends an eighth over the network
    assert byte_cost((("node", 1, 2),), sizes) == 9
    assert byte_cost(("node",), {"node": 4}) == 1


@pytest.mark.parametrize("slow", ["a", "b"])
def test_steps_carry_their_cost(slow):
    sizes = {"a": 4, "b": 4}
    have, want = Spec(dims=(Dim(axes=("a", "b")), Dim())), Spec(dims=(Dim(), Dim()))
    plain = chain(have, want, (64, 64), 4, sizes)
    weighed = chain(have, want, (64, 64), 4, MeshSizes(sizes, {slow: 8.0}))
    assert chain_cost(weighed) > chain_cost(plain)
    assert all((step.byte_cost > 1) == (slow in step.axes) for step in weighed)
