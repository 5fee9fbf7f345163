"""Collectives and memory of attention over a sharded sequence: documented, compiled and predicted."""

import functools
import importlib.util
import math

import jax
import jax.numpy as jnp
import pytest
from support.attention_reference import SIZE, arrays, with_gradients

import sharding
from sharding import P, sequence
from sharding.cost import compile_only, read_compiled

SHARDED = P("data", "seq")
LENGTH, HEADS, GROUPS = 16, 8, 4


def facts(f, args, axes, spec=SHARDED):
    """Predicted and compiled collectives of a program."""
    with sharding.mesh(axes, devices=jax.devices()[: math.prod(axes.values())]) as mesh:
        step = sharding.jit(f, in_shardings=(spec,) * len(args))
        compiled = step.lower(*args).compile()
        return step.complete(*args).communication().lowered("cpu"), read_compiled(compiled, mesh=mesh)


def forward_and_both(kind, axes, order="plain"):
    """Facts of attention, and of attention with its gradients, with one sequence per device."""
    attend = functools.partial(sequence.attention, kind=kind, order=order)
    args = arrays(LENGTH)
    return facts(attend, args[:3], axes), facts(with_gradients(attend), args, axes)


@pytest.mark.parametrize(
    ("kind", "order"),
    [("ring", "zigzag"), pytest.param("ring", "plain", marks=pytest.mark.slow), ("ring_self", "plain")],
)
def test_rings_permute_keys_and_values(kind, order):
    n, axes = 4, {"data": 2, "seq": 4}
    keys = LENGTH // n * GROUPS * SIZE * 4  # bytes on one device, of one sequence
    (_, forward), (_, both) = found = forward_and_both(kind, axes, order)
    assert forward.by_axes() == {("collective-permute", ("seq",)): (2 * (n - 1), 2 * (n - 1) * keys)}
    permutes = {kind: total for (kind, _), total in both.by_axes().items()}["collective-permute"]
    # The forward ring, keys and values once more, and their gradients all the way around.
    times = 2 * (n - 1) + 2 * (n - 1) + 2 * n
    assert permutes == (times, times * keys)
    for predicted, compiled in found:
        assert predicted.by_kind() == compiled.by_kind()


@pytest.mark.parametrize("axes", [{"data": 2, "seq": 4}, {"data": 2, "tensor": 2, "seq": 2}])
def test_ulysses_is_four_all_to_alls(axes):
    spec = P("data", "seq", "tensor") if "tensor" in axes else SHARDED
    attend = functools.partial(sequence.attention, kind="ulysses")
    args = arrays(LENGTH)
    head_bytes = LENGTH * SIZE * 4 // (axes["seq"] * axes.get("tensor", 1))  # local bytes of a head
    for f, count, inputs in ((attend, 1, args[:3]), (with_gradients(attend), 2, args)):
        predicted, compiled = facts(f, inputs, axes, spec)
        assert predicted.by_kind() == compiled.by_kind()
        assert compiled.by_kind()["all-to-all"] == (4 * count, count * 2 * (HEADS + GROUPS) * head_bytes)
        assert {kind for kind, _ in compiled.by_kind().items()} <= {"all-to-all", "all-reduce"}
        assert all(c.bytes == 4 for c in compiled.collectives if c.kind == "all-reduce")  # the weighted sum


def temp_bytes(devices, kind):
    """Temporaries of one device, with 32 positions per device."""
    shape = jax.ShapeDtypeStruct((1, 32 * devices, 2, 8), jnp.float32)
    attend = functools.partial(sequence.attention, kind=kind, order="zigzag")
    _, compiled = facts(with_gradients(attend), [shape] * 4, {"seq": devices}, P(None, "seq"))
    assert compiled.memory is not None
    return compiled.memory.temp_bytes


def test_ring_memory_does_not_grow_with_the_axis():
    few, many = temp_bytes(4, "ring"), temp_bytes(8, "ring")
    assert many - few <= 512  # tables of masked blocks
    assert temp_bytes(8, "ring_self") > 1.5 * many  # complete rows of scores


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs libtpu")
def test_compiled_ahead_of_time_for_tpus():
    temps = []
    for chips, devices in ((4, "v5p:2x2x1"), (8, "v5p:2x2x2")):
        shape = jax.ShapeDtypeStruct((1, 512 * chips, 16, 128), jnp.bfloat16)
        attend = with_gradients(functools.partial(sequence.attention, order="zigzag"))
        with sharding.mesh(seq=chips, devices=compile_only(devices)) as mesh:
            step = sharding.jit(attend, in_shardings=(P(None, "seq"),) * 4)
            compiled = read_compiled(step.lower(*[shape] * 4).compile(), mesh=mesh)
        assert compiled.by_kind()["collective-permute"][0] == 6 * chips - 4
        assert compiled.memory is not None
        temps.append(compiled.memory.temp_bytes)
    assert max(temps) <= 1.01 * min(temps)
