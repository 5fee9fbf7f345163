"""Kernel orders by hand."""

from sharding.memory.fusion import Kernel
from sharding.memory.instruction import Instruction
from sharding.memory.kernel_order import program_order, xla_cpu_order


def kernel(name, *operands):
    one = Instruction(name, "unfusible", [k.root for k in operands], (4,), 16)
    return Kernel(one, [one], list(one.operands))


def names(steps):
    return [" ".join(k.root.name for k in step.kernels) for step in steps]


def test_xla_cpu_runs_kernels_breadth_first():
    x = kernel("x")
    a1, b1 = kernel("a1", x), kernel("b1", x)
    a2, b2 = kernel("a2", a1), kernel("b2", b1)
    end = kernel("end", a2, b2)
    written = [x, a1, a2, b1, b2, end]
    assert names(xla_cpu_order(written, [end.root])) == ["x", "a1", "b1", "a2", "b2", "end"]
    assert names(program_order(written, [end.root])) == ["x", "a1", "a2", "b1", "b2", "end"]
