"""Vector ops that compute an element from what is read."""

from sharding.memory.instruction import Instruction
from sharding.memory.vector_ops import num_vector_ops


def test_vector_ops_are_those_on_each_element_of_the_result():
    row = Instruction("argument", "argument", [], (8,), 32)
    small = Instruction("erf", "fusible", [row], (8,), 32, elementwise=True)
    wide = Instruction("broadcast_in_dim", "fusible", [small], (8, 128), 4096)
    read = Instruction("argument", "argument", [], (8, 128), 4096)
    twice = Instruction("add", "fusible", [read, read], (8, 128), 4096, elementwise=True)
    end = Instruction("mul", "fusible", [wide, twice], (8, 128), 4096, elementwise=True)
    assert num_vector_ops(end, {row, read}, limit=100) == 2
    assert num_vector_ops(end, {row, read}, limit=0) == 1
