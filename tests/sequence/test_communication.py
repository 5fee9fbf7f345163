"""What attention over a split sequence sends and holds: promised, compiled and predicted."""

import functools
import importlib.util
import math

import jax
import jax.numpy as jnp
import pytest
from sequences import SIZE, arrays, with_gradients

import sharding
from sharding import P, sequence
from sharding.cost import compile_only, read_compiled

SPLIT = P("data", "seq")
LENGTH, HEADS, GROUPS = 16, 8, 4


def facts(f, args, axes, spec=SPLIT):
    """What was predicted of a program, and what XLA made of it."""
    with sharding.mesh(axes, devices=jax.devices()[: math.prod(axes.values())]) as mesh:
        step = sharding.jit(f, in_shardings=(spec,) * len(args))
        compiled = step.lower(*args).compile()
        return step.complete(*args).communication().lowered("cpu"), read_compiled(compiled, mesh=mesh)


def forward_and_both(kind, axes, order="plain"):
    """Of attention, and of attention with its gradients, on one device's share of a batch of two."""
    attend = functools.partial(sequence.attention, kind=kind, order=order)
    args = arrays(LENGTH)
    return facts(attend, args[:3], axes), facts(with_gradients(attend), args, axes)


@pytest.mark.parametrize(
    ("kind", "order"),
    [("ring", "zigzag"), pytest.param("ring", "plain", marks=pytest.mark.slow), ("ring_self", "plain")],
)
def test_rings_pass_on_keys_and_values(kind, order):
    n, axes = 4, {"data": 2, "seq": 4}
    keys = LENGTH // n * GROUPS * SIZE * 4  # bytes on one device, of one sequence
    (_, forward), (_, both) = found = forward_and_both(kind, axes, order)
    assert forward.by_axes() == {("collective-permute", ("seq",)): (2 * (n - 1), 2 * (n - 1) * keys)}
    permutes = {kind: total for (kind, _), total in both.by_axes().items()}["collective-permute"]
    # Again forward, keys and values once more, and their gradients all the way home.
    times = 2 * (n - 1) + 2 * (n - 1) + 2 * n
    assert permutes == (times, times * keys)
    for predicted, compiled in found:
        assert predicted.by_kind() == compiled.by_kind()


@pytest.mark.parametrize("axes", [{"data": 2, "seq": 4}, {"data": 2, "tensor": 2, "seq": 2}])
def test_ulysses_is_four_all_to_alls(axes):
    spec = P("data", "seq", "tensor") if "tensor" in axes else SPLIT
    attend = functools.partial(sequence.attention, kind="ulysses")
    args = arrays(LENGTH)
    share = LENGTH * SIZE * 4 // (axes["seq"] * axes.get("tensor", 1))  # bytes of a head
    for f, count, given in ((attend, 1, args[:3]), (with_gradients(attend), 2, args)):
        predicted, compiled = facts(f, given, axes, spec)
        assert predicted.by_kind() == compiled.by_kind()
        assert compiled.by_kind()["all-to-all"] == (4 * count, count * 2 * (HEADS + GROUPS) * share)
        assert {kind for kind, _ in compiled.by_kind().items()} <= {"all-to-all", "all-reduce"}
        assert all(c.bytes == 4 for c in compiled.collectives if c.kind == "all-reduce")  # the weighted sum


def temp_bytes(devices, kind):
    """Of one device, for 32 positions on each."""
    shape = jax.ShapeDtypeStruct((1, 32 * devices, 2, 8), jnp.float32)
    attend = functools.partial(sequence.attention, kind=kind, order="zigzag")
    _, compiled = facts(with_gradients(attend), [shape] * 4, {"seq": devices}, P(None, "seq"))
    assert compiled.memory is not None
    return compiled.memory.temp_bytes


def test_memory_of_a_ring_does_not_grow_with_the_devices():
    few, many = temp_bytes(4, "ring"), temp_bytes(8, "ring")
    assert many - few <= 512  # tables of what is masked
    assert temp_bytes(8, "ring_self") > 1.5 * many  # whole rows of scores


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs libtpu")
def test_as_the_compiler_for_tpus_has_it():
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
