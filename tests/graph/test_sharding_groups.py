"""Groups that `sharding.same` makes: which annotations contradict each other, by name and origin."""

import re

import jax.numpy as jnp
import pytest
from support.annotated_programs import propagate

import sharding
from sharding import ShardingError

SQUARE = (8, 8)


def f(x, y, z, other):
    x, y, z = sharding.same(x, y, z)
    return x + 1.0, y + 1.0, z + 1.0, jnp.sin(other)


def test_members_that_agree_share_one_spec():
    found = propagate(f, (SQUARE, "a ?"), (SQUARE, None), (SQUARE, "? b"), (SQUARE, "b a"))
    assert {found.specs[v].axes for v in found.graph.inputs[:3]} == {(("a",), ("b",))}


@pytest.mark.parametrize("given, fault", [(["a -", "a ?", "b -"], ("x0", "x2")), (["a ?", "? c", "? b"], ("x1", "x2"))])
def test_a_contradiction_names_the_two_members(given, fault):
    with pytest.raises(ShardingError, match=r"sharding\.same at test_sharding_groups\.py") as caught:
        propagate(f, *[(SQUARE, text) for text in given], (SQUARE, "b a"))
    assert re.findall(r"x\d", str(caught.value)) == list(fault)  # not the array outside the group


def test_the_same_groups_twice_are_one():
    def twice(x, y, z):
        x, y = sharding.same(x, y)
        y, z = sharding.same(y, z)
        return x * 2.0, y * 2.0, z * 2.0

    found = propagate(twice, (SQUARE, "a -"), (SQUARE, None), (SQUARE, None))
    assert {found.specs[v].axes for v in found.graph.inputs} == {(("a",), ())}
