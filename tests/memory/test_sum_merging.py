"""Partial sums that are added before they are reduced."""

import jax
import jax.numpy as jnp
import pytest

import sharding
from sharding import P
from sharding.memory.compiler_traits import TRAITS
from sharding.memory.device_program import lower
from sharding.memory.instruction import Body, Instruction
from sharding.memory.sum_merging import merge_sums

ARRAY = jax.ShapeDtypeStruct((64, 64), "float32")


def three_products(x, q, k, v):
    return jnp.sin(x @ q + x @ k + x @ v)


def reductions(f, platform):
    with sharding.mesh({"tensor": 8}):
        completed = sharding.jit(f, in_shardings=(P(None, "tensor"), *[P("tensor")] * 3)).complete(*[ARRAY] * 4)
    found = lower(completed.assignment, TRAITS[platform]).body.live_instructions()
    return [one for one in found if one.name == "all-reduce"]


@pytest.mark.parametrize(("platform", "count"), [("cpu", 3), ("gpu", 1), ("tpu", 1)])
def test_partial_sums_of_three_products_are_reduced_once_but_on_cpus(platform, count):
    assert len(reductions(three_products, platform)) == count


def test_a_sum_that_something_else_reads_is_reduced_by_itself():
    def read_twice(x, q, k, v):
        y = x @ q
        return y + x @ k, jnp.sin(y) * (x @ v)

    assert len(reductions(read_twice, "gpu")) == 3


@pytest.mark.parametrize("groups", [("data", "tensor"), ("data", None)])
def test_sums_over_other_devices_stay_apart(groups):
    x, y = (Instruction("argument", "argument", [], (4,), 16) for _ in range(2))
    sums = [
        Instruction("all-reduce", "unfusible", [one], (4,), 16, group=group)
        for one, group in zip((x, y), groups, strict=True)
    ]
    total = Instruction("add", "fusible", sums, (4,), 16, elementwise=True)
    body = Body([x, y, *sums, total], [x, y], [total])
    merge_sums(body)
    assert total.name == "add" and body.instructions == [x, y, *sums, total]
