"""Reshards of arrays that axes do not divide: arguments arrive with fewer axes, shards are realigned, as compiled."""

import random

import jax
import jax.numpy as jnp
import pytest
from support import quick_compile

import sharding
from sharding import P, annotate, cost

pytestmark = pytest.mark.filterwarnings("ignore:.*XLA pads it")
MESHES = ({"a": 2, "b": 2, "idle": 2}, {"a": 2, "b": 4}, {"a": 4, "b": 2}, {"a": 2, "b": 2, "c": 2})


def predicted_and_compiled(rows, columns, sizes, before, after):
    def fn(x):
        return jnp.sin(annotate(jnp.cos(annotate(x, before)), after))

    x = jax.ShapeDtypeStruct((rows, columns), "float32")
    with sharding.mesh(sizes):
        jitted = sharding.jit(fn)
        ledger = jitted.complete(x).communication().lowered("cpu")
        compiled = cost.read_compiled(jitted.lower(x).compile(quick_compile.OPTIONS))
    return ledger, compiled.by_kind()


@pytest.mark.parametrize("sizes", MESHES[:3], ids=str)
@pytest.mark.parametrize("after", [P("a"), P("b"), P()])
@pytest.mark.parametrize("rows", [10, 12, 20])
def test_an_argument_arrives_over_the_axes_that_divide_it(rows, after, sizes):
    ledger, compiled = predicted_and_compiled(rows, 4, sizes, P(("a", "b")), after)
    assert ledger.by_kind() == compiled
    arrives_over_a = rows % sizes["a"] == 0 and rows % (sizes["a"] * sizes["b"]) != 0
    assert any("argument" in c.cause for c in ledger) == arrives_over_a


@pytest.mark.parametrize("rows, is_exchanged", [(14, False), (15, True), (13, False), (23, True), (24, True)])
def test_an_all_to_all_only_makes_parts_of_the_shards_that_are_there(rows, is_exchanged):
    ledger, compiled = predicted_and_compiled(rows, 8, {"a": 4, "b": 2}, P("b", "a"), P(("b", "a")))
    assert ledger.by_kind() == compiled
    assert ("all-to-all" in compiled) == is_exchanged


def case(seed):
    rng = random.Random(seed)
    sizes = rng.choice(MESHES)
    axes = [axis for axis in sizes if axis != "idle"]

    def spec():
        dims = [], [], []
        for axis in rng.sample(axes, len(axes)):
            dims[rng.choice([0, 0, 0, 1, 2])].append(axis)
        return P(*(tuple(dim) or None for dim in dims[:2]))

    return rng.randint(5, 40), rng.choice([4, 6, 8]), sizes, spec(), spec()


@pytest.mark.parametrize("seed", [*range(16), *(pytest.param(n, marks=pytest.mark.slow) for n in range(16, 200))])
def test_generated_reshards(seed):
    ledger, compiled = predicted_and_compiled(*case(seed))
    assert ledger.by_kind() == compiled
