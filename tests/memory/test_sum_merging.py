"""Partial sums that are added before they are reduced."""

import jax
import jax.numpy as jnp
import pytest
from support import compilers
from support.compilers import COMPILERS

import sharding
from sharding import P, cost
from sharding.memory.compiler_traits import TRAITS
from sharding.memory.device_program import lower
from sharding.memory.instruction import Body, Instruction
from sharding.memory.sum_merging import merge_sums

ARRAY = jax.ShapeDtypeStruct((64, 64), "float32")


def three_products(x, q, k, v):
    return jnp.sin(x @ q + x @ k + x @ v)


def reshaped_products(x, q, k, v):
    return jnp.sin((x @ q).reshape(8, 512) + (x @ k).reshape(8, 512))


def reductions(f, platform):
    with sharding.mesh({"tensor": 8}):
        completed = sharding.jit(f, in_shardings=(P(None, "tensor"), *[P("tensor")] * 3)).complete(*[ARRAY] * 4)
    found = lower(completed.assignment, TRAITS[platform]).body.live_instructions()
    return [one for one in found if one.name == "all-reduce"]


@pytest.mark.parametrize(("platform", "count"), [("cpu", 3), ("gpu", 1), ("tpu", 1)])
def test_partial_sums_of_three_products_are_reduced_once_but_on_cpus(platform, count):
    assert len(reductions(three_products, platform)) == count


def test_partial_sums_are_added_through_reshapes():
    (found,) = reductions(reshaped_products, "tpu")
    assert found.shape == (8, 512)


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


def recurrent(w, x):
    """The gradient of a weight that every iteration reads."""

    def loss(w):
        def iteration(h, row):
            h = jnp.tanh(h @ w + row)
            return h, h

        return jnp.square(jax.lax.scan(iteration, jnp.zeros_like(x[0]), x)[1]).mean()

    return w - 0.1 * jax.grad(loss)(w)


def recurrent_step(rows, features, devices=None):
    x = jax.ShapeDtypeStruct((16, rows, features), "float32")
    w = jax.ShapeDtypeStruct((features, features), "float32")
    with sharding.mesh({"data": 8}, devices=devices):
        step = sharding.jit(recurrent, in_shardings=(P(), P(None, "data")))
        return step, step.complete(w, x), (w, x)


@pytest.mark.parametrize(("platform", "inside"), [("cpu", 1), ("gpu", 0), ("tpu", 0)])
def test_what_iterations_add_up_is_reduced_behind_the_loop_but_on_cpus(platform, inside):
    _, completion, _ = recurrent_step(64, 64)
    program = lower(completion.assignment, TRAITS[platform]).body
    loops = [body for one in program.live_instructions() for body in one.bodies]
    found = [one for body in loops for one in body.live_instructions() if one.name == "all-reduce"]
    behind = [one for one in program.live_instructions() if one.name == "all-reduce"]
    assert (len(found), len(behind)) == (inside, 1 - inside)


@pytest.mark.slow
@pytest.mark.parametrize(("platform", "described"), [COMPILERS["tpu"], COMPILERS["gpu"]])
@pytest.mark.parametrize("features", [512, 2048])
def test_the_peak_of_a_recurrent_step(platform, described, features):
    step, completion, args = recurrent_step(256, features, compilers.devices(described))
    with sharding.mesh({"data": 8}, devices=compilers.devices(described)):
        compiled = cost.read_compiled(step.lower(*args).compile()).peak_bytes
    assert completion.memory(platform=platform).peak_bytes == pytest.approx(compiled, rel=0.15)
