"""Fused kernels of XLA:CPU, by hand and as it compiles them."""

import random
import re

import jax
import jax.numpy as jnp
import pytest
from support.fused_kernels import argument, by_root, check_all_computed, make

import sharding
from sharding import cost
from sharding.memory.compiler_traits import TRAITS
from sharding.memory.cpu_fusion import MAX_COPIES, fuse_on_cpu
from sharding.memory.device_program import lower
from sharding.memory.instruction import Body


def stored(*instructions, results=None):
    """Name of each stored instruction but arguments -> those computed inside its kernel."""
    kernels = fuse_on_cpu(instructions, results or [instructions[-1]])
    return by_root(kernels)


def dot(*operands):
    return make("dot", *operands, role="unfusible")


@pytest.mark.parametrize(("reads", "is_recomputed"), [(["x"], True), (["x", "row"], True), (["x", "y"], False)])
def test_what_a_product_reads_is_computed_again_where_that_reads_one_array_as_large(reads, is_recomputed):
    x, y, row = argument(), argument("y"), argument("row", (64,))
    spread = make("broadcast_in_dim", row)
    a = make("a", *[{"x": x, "y": y, "row": spread}[name] for name in reads], elementwise=True)
    b = make("b", a, elementwise=True)
    found = stored(x, y, row, spread, a, b, dot(a, b))
    assert "a" in found and ("a" in found["b"]) == is_recomputed


def test_a_sum_of_two_arrays_is_computed_again_where_nothing_needs_it_in_memory():
    x, y = argument(), argument("y")
    a = make("a", x, y, elementwise=True)
    b, c = make("b", a, elementwise=True), make("c", a, elementwise=True)
    assert stored(x, y, a, b, c, dot(b, c)) == {"b": ["a"], "c": ["a"], "dot": []}


def test_a_sum_is_stored_where_a_product_lies_between_it_and_another_reader():
    """As a residual stream is."""
    x, y = argument(), argument("y")
    a = make("a", x, y, elementwise=True)
    inner = dot(make("b", a, elementwise=True), x)
    end = make("end", a, inner, elementwise=True)
    found = stored(x, y, a, inner.operands[0], inner, end)
    assert found["a"] == [] and found["end"] == []


@pytest.mark.parametrize("expensive", [False, True])
def test_an_expensive_op_is_stored_for_several_readers_and_before_a_broadcast(expensive):
    x = argument(shape=(64,))
    a = make("a", x, shape=(64,), elementwise=True, expensive=expensive)
    spread = make("broadcast_in_dim", a)
    found = stored(x, a, spread, make("end", spread, elementwise=True))
    assert ("a" in found) == expensive


def test_a_pad_that_two_ops_read_is_stored_and_one_that_one_op_reads_is_not():
    x = argument(shape=(32, 64))
    pad = make("pad", x)
    b = make("b", make("inner", pad, elementwise=True), elementwise=True)
    alone = stored(x, pad, b.operands[0], b)
    assert alone == {"b": ["pad", "inner"]}
    c = make("c", make("other", pad, elementwise=True), elementwise=True)
    both = stored(x, pad, b.operands[0], b, c.operands[0], c, dot(b, c))
    assert both["pad"] == [] and both["b"] == ["inner"]


def test_a_kernel_has_few_copies_of_an_instruction():
    """Each level reads the one below at its own and at another index: twice as many copies."""
    one = argument()
    made = [one]
    for level in range(8):
        shifted = make(f"slice{level}", one)
        shifted.shape = (63, 64 + level)
        one = make(f"level{level}", one, shifted, elementwise=True)
        made += [shifted, one]
    found = stored(*made)
    assert len(found) > 1
    assert all(len(inside) <= 2 * MAX_COPIES for inside in found.values())


def test_the_library_takes_what_only_a_reduction_needs_and_what_follows():
    x = argument(shape=(128, 64))
    double = make("mul", x, shape=(128, 64), elementwise=True)
    square = make("square", double, shape=(128, 64), elementwise=True)
    total = make("reduce_sum", square, shape=(128,), is_library_reduction=True, expensive=True)
    spread = make("broadcast_in_dim", total, shape=(128, 64))
    end = make("add", spread, double, shape=(128, 64), elementwise=True)
    last = make("select_n", end, shape=(128, 64), elementwise=True)
    assert stored(x, double, square, total, spread, end, last) == {
        "add": ["mul", "square", "reduce_sum", "broadcast_in_dim"],
        "select_n": [],
    }


def test_the_library_reads_from_memory_what_others_need_too():
    x = argument(shape=(128, 64))
    double = make("mul", x, shape=(128, 64), elementwise=True)
    total = make("reduce_sum", double, shape=(128,), is_library_reduction=True, expensive=True)
    other = make("select_n", double, shape=(128, 64), elementwise=True)
    end = make("end", total, other, shape=(128, 64), role="unfusible")
    assert stored(x, double, total, other, end) == {"mul": [], "reduce_sum": [], "select_n": ["mul"], "end": []}


def test_the_library_reads_transposed_and_writes_in_order():
    x = argument(shape=(128, 64))
    turned = make("transpose", x, shape=(64, 128))
    total = make("reduce_sum", turned, shape=(64,), is_library_reduction=True, expensive=True)
    spread = make("broadcast_in_dim", total, shape=(64, 128))
    back = make("transpose", spread, shape=(128, 64))
    end = make("add", back, x, shape=(128, 64), elementwise=True)
    assert stored(x, turned, total, spread, back, end) == {
        "broadcast_in_dim": ["transpose", "reduce_sum"],
        "add": ["transpose"],
    }


def test_a_result_that_is_cheap_is_computed_again_by_what_reads_it():
    x = argument()
    a = make("a", x, elementwise=True)
    b = make("b", a, elementwise=True)
    assert stored(x, a, b, results=[a, b]) == {"a": [], "b": ["a"]}


@pytest.mark.parametrize("seed", range(40))
def test_kernels_of_a_random_program_compute_everything_that_they_need(seed):
    r = random.Random(seed)
    made = [argument() for _ in range(3)]
    for k in range(30):
        role = r.choice(["fusible", "fusible", "fusible", "unfusible", "bitcast"])
        operands = r.sample(made[-8:], r.choice([1, 2, 2]) if role != "bitcast" else 1)
        is_reduction = role == "fusible" and r.random() < 0.2
        facts = {"elementwise": not is_reduction, "is_library_reduction": is_reduction, "expensive": r.random() < 0.3}
        name = r.choice(["mul", "select_n", f"i{k}"])
        made.append(make("reduce_sum" if is_reduction else name, *operands, role=role, **facts))
    results = r.sample(made[-6:], 2)
    alive = Body(made, made[:3], results).live_instructions()
    check_all_computed(fuse_on_cpu(alive, results), alive, results)


@pytest.mark.parametrize(("dim", "runs_alone"), [(1, True), (0, False)])
def test_arrays_joined_along_the_last_dim_are_stored_and_joined_alone(dim, runs_alone):
    def joined(x, y):
        return jnp.tanh(jnp.concatenate([x * 3, y + 1], dim) + 2)

    x = jax.ShapeDtypeStruct((256, 256), "float32")
    with sharding.mesh({"data": 8}):
        step = sharding.jit(joined)
        body = lower(step.complete(x, x).assignment, TRAITS["cpu"]).body
        text = step.lower(x, x).compile().as_text()
    kernels = [k for k in fuse_on_cpu(body.live_instructions(), body.results) if k.operands]
    entry = text[text.index("ENTRY") :]
    assert len(kernels) == len(re.findall(r" = f32.* (?:fusion|concatenate)\(", entry)) == (4 if runs_alone else 1)


def interleaved(x, y):
    """As an associative scan does."""
    pads = [((k, 1 - k, 1), (0, 0, 0)) for k in range(2)]
    both = jax.lax.pad(x, 0.0, pads[0]) + jax.lax.pad(y, 0.0, pads[1])
    return both[1:] * 2, both[:-1] + 3, jnp.sin(both)


def joined_columns(x, y):
    return jnp.tanh(jnp.concatenate([x * 3, y + 1], 0) + 2)


def mixed_product(x, y):
    """JAX converts the real operand."""
    wide = jax.lax.complex(x, y)
    return jax.lax.dot_general(x * 2, wide, (((1,), (1,)), ((), ()))), y * 2


@pytest.mark.parametrize("f", [interleaved, joined_columns, mixed_product])
def test_the_peak_is_the_one_that_xla_compiles(f):
    x = jax.ShapeDtypeStruct((256, 256), "float32")
    with sharding.mesh({"data": 8}):
        step = sharding.jit(f)
        predicted = step.complete(x, x).memory(platform="cpu").peak_bytes
        compiled = step.lower(x, x).compile()
    assert predicted == pytest.approx(cost.read_compiled(compiled).peak_bytes, rel=0.05)
