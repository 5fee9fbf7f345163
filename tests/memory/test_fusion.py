"""Fused kernels by hand."""

from sharding.memory.fusion import fuse
from sharding.memory.instruction import Instruction

BIG = (64, 64)


def make(name, *operands, shape=BIG, role="fusible", **facts):
    count = shape[0] * (shape[1] if len(shape) > 1 else 1)
    return Instruction(name, role, list(operands), shape, 4 * count, **facts)


def stored(*instructions):
    """Name of each stored instruction but arguments -> those computed inside its kernel."""
    kernels = fuse(instructions, [instructions[-1]])
    return {k.root.name: [m.name for m in k.members if m is not k.root] for k in kernels if k.root.role != "argument"}


def argument():
    return make("x", role="argument")


def test_a_chain_is_one_kernel():
    x = argument()
    a = make("a", x, elementwise=True)
    b = make("b", a, elementwise=True)
    assert stored(x, a, b) == {"b": ["a"]}


def test_an_unfusible_op_reads_stored_operands():
    x = argument()
    a = make("a", x, elementwise=True)
    dot = make("dot", a, x, role="unfusible")
    assert stored(x, a, dot) == {"a": [], "dot": []}


def test_a_cheap_op_is_duplicated_and_an_expensive_one_stored():
    for expensive, expected in ((False, {"b": ["a"], "c": ["a"]}), (True, {"a": [], "b": [], "c": []})):
        x = argument()
        a = make("a", x, elementwise=True, expensive=expensive)
        b, c = make("b", a, elementwise=True), make("c", a, elementwise=True)
        dot = make("dot", b, c, role="unfusible")
        found = stored(x, a, b, c, dot)
        assert found.pop("dot") == [] and found == expected


def test_an_expensive_op_read_by_one_kernel_is_fused():
    x = argument()
    a = make("a", x, elementwise=True, expensive=True)
    b = make("b", a, elementwise=True)
    c = make("c", a, b, elementwise=True)
    assert stored(x, a, b, c) == {"c": ["a", "b"]}


def test_an_expensive_op_that_is_broadcast_is_stored():
    x = make("x", role="argument", shape=(64,))
    a = make("a", x, shape=(64,), elementwise=True, expensive=True)
    wide = make("broadcast_in_dim", a, reuses_operand=True)
    end = make("end", wide, elementwise=True)
    assert stored(x, a, wide, end) == {"a": [], "end": ["broadcast_in_dim"]}


def test_an_op_that_reads_more_than_it_produces_is_stored_if_one_consumer_cannot_fuse_it():
    x, y = argument(), argument()
    both = make("both", x, y, elementwise=True)
    cheap = make("cheap", both, elementwise=True)
    dot = make("dot", both, role="unfusible")
    end = make("end", cheap, dot, elementwise=True)
    assert stored(x, y, both, cheap, dot, end) == {"both": [], "dot": [], "end": ["cheap"]}


def test_a_library_reduction_fuses_its_neighbours():
    x = make("x", role="argument", shape=(128, 64))
    square = make("mul", x, x, shape=(128, 64), elementwise=True)
    total = make("reduce_sum", square, shape=(128, 1), is_library_reduction=True, expensive=True)
    end = make("end", total, shape=(128, 1), elementwise=True)
    assert stored(x, square, total, end) == {"reduce_sum": ["mul"], "end": []}
