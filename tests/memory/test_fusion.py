"""What is stored, by hand."""

from sharding.memory.fusion import fuse
from sharding.memory.instruction import Instruction

BIG = (64, 64)


def make(name, *operands, shape=BIG, role="loop", **facts):
    count = shape[0] * (shape[1] if len(shape) > 1 else 1)
    return Instruction(name, role, list(operands), shape, 4 * count, **facts)


def stored(*instructions):
    """The names of what is stored, arguments left out, and what each kernel computes inside."""
    kernels = fuse(instructions, [instructions[-1]])
    return {k.root.name: [m.name for m in k.members if m is not k.root] for k in kernels if k.root.role != "argument"}


def argument():
    return make("x", role="argument")


def test_a_chain_is_one_kernel():
    x = argument()
    a = make("a", x, elementwise=True)
    b = make("b", a, elementwise=True)
    assert stored(x, a, b) == {"b": ["a"]}


def test_a_library_call_reads_what_is_stored():
    x = argument()
    a = make("a", x, elementwise=True)
    dot = make("dot", a, x, role="library")
    assert stored(x, a, dot) == {"a": [], "dot": []}


def test_a_cheap_op_is_copied_into_its_readers_and_a_dear_one_is_stored():
    for expensive, expected in ((False, {"b": ["a"], "c": ["a"]}), (True, {"a": [], "b": [], "c": []})):
        x = argument()
        a = make("a", x, elementwise=True, expensive=expensive)
        b, c = make("b", a, elementwise=True), make("c", a, elementwise=True)
        dot = make("dot", b, c, role="library")
        found = stored(x, a, b, c, dot)
        assert found.pop("dot") == [] and found == expected


def test_a_dear_op_whose_readers_are_one_kernel_is_computed_there():
    x = argument()
    a = make("a", x, elementwise=True, expensive=True)
    b = make("b", a, elementwise=True)
    c = make("c", a, b, elementwise=True)
    assert stored(x, a, b, c) == {"c": ["a", "b"]}


def test_a_dear_op_that_is_spread_out_is_stored():
    x = make("x", role="argument", shape=(64,))
    a = make("a", x, shape=(64,), elementwise=True, expensive=True)
    wide = make("broadcast_in_dim", a, reuses=True)
    end = make("end", wide, elementwise=True)
    assert stored(x, a, wide, end) == {"a": [], "end": ["broadcast_in_dim"]}


def test_what_reads_more_than_it_makes_is_stored_where_one_reader_needs_it_stored():
    x, y = argument(), argument()
    both = make("both", x, y, elementwise=True)
    cheap = make("cheap", both, elementwise=True)
    dot = make("dot", both, role="library")
    end = make("end", cheap, dot, elementwise=True)
    assert stored(x, y, both, cheap, dot, end) == {"both": [], "dot": [], "end": ["cheap"]}


def test_a_large_reduction_takes_its_neighbours_along():
    x = make("x", role="argument", shape=(128, 64))
    square = make("mul", x, x, shape=(128, 64), elementwise=True)
    total = make("reduce_sum", square, shape=(128, 1), by_library=True, expensive=True)
    end = make("end", total, shape=(128, 1), elementwise=True)
    assert stored(x, square, total, end) == {"reduce_sum": ["mul"], "end": []}
