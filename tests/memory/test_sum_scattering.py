"""Sums of which each device keeps a part."""

import jax
import jax.numpy as jnp
import pytest

import sharding
from sharding import P
from sharding.memory.compiler_traits import TRAITS
from sharding.memory.device_program import lower

ROWS = jax.ShapeDtypeStruct((64, 32), "float32")


SHARDED = P("data")


def collectives(f, platform, *args, in_shardings=(SHARDED,), out_shardings=SHARDED):
    """The name and local shape of each collective of a program."""
    with sharding.mesh({"data": 8}):
        jitted = sharding.jit(f, in_shardings=in_shardings, out_shardings=out_shardings)
        completed = jitted.complete(*(args or [ROWS]))
    found = lower(completed.assignment, TRAITS[platform]).body.live_instructions()
    return [(one.name, one.shape) for one in found if one.role == "unfusible"]


@pytest.mark.parametrize(("platform", "expected"), [("gpu", ("reduce-scatter", (4,))), ("cpu", ("all-reduce", (32,)))])
def test_a_sum_of_which_each_device_keeps_a_part_is_scattered_on_gpus(platform, expected):
    assert collectives(lambda x: x.sum(0), platform) == [expected]


def test_it_is_converted_behind_that():
    def converted(x):
        return x.sum(0).astype(jnp.bfloat16)

    with sharding.mesh({"data": 8}):
        jitted = sharding.jit(converted, in_shardings=P("data"), out_shardings=P("data"))
        found = lower(jitted.complete(ROWS).assignment, TRAITS["gpu"]).body.live_instructions()
    sums = [one for one in found if one.name == "reduce-scatter"]
    assert [one.shape for one in sums] == [(4,)]
    assert {one.shape for one in found if one.name == "convert_element_type"} == {(4,)}


def test_a_sum_that_is_also_read_as_a_whole_is_not():
    def read_twice(x):
        total = sharding.annotate(x.sum(0), P())
        return total + 1.0, jnp.sort(total)

    found = collectives(read_twice, "gpu", out_shardings=(P("data"), P()))
    assert ("all-reduce", (32,)) in found and "reduce-scatter" not in [name for name, _ in found]


def test_nor_is_one_that_all_devices_keep():
    assert collectives(lambda x: x.sum(0), "gpu", out_shardings=P()) == [("all-reduce", (32,))]


def test_rows_that_are_masked_where_they_are_out_of_bounds_are_sliced_behind_the_sum():
    index = jax.ShapeDtypeStruct((16,), "int32")
    found = collectives(
        lambda table, i: jnp.take(table, i, axis=0, mode="fill"),
        "gpu",
        ROWS,
        index,
        in_shardings=(P("data"), P()),
        out_shardings=P("data"),
    )
    assert "reduce-scatter" not in [name for name, _ in found]
