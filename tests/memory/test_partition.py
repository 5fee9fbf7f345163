"""How ops are cut, by hand: on a mesh of two axes, a and b."""

import pytest

from sharding.graph import Op
from sharding.memory.partition import Partitions
from sharding.propagation.atoms import AtomTable
from sharding.rules import rule_for

A, B = (0,), (1,)
TABLE = AtomTable.of({"a": 2, "b": 2})
DOT = {"dimension_numbers": (((1,), (0,)), ((), ()))}


def cut(primitive, params, ins, outs, operands, results):
    rule = rule_for(primitive, ins, outs, params)
    op = Op(primitive, tuple(range(len(ins))), (9,), rule, (), 1)
    return Partitions(TABLE).of(op, operands, results)


CASES = {
    "rows and columns": ([(A, ()), ((), B)], [(A, B)], [(A, ()), ((), B)], [(A, B)], ()),
    "a sum over devices": ([((), A), (A, ())], [((), ())], [((), A), (A, ())], [((), ())], A),
    "the other operand is cut too": ([((), A), ((), ())], [((), ())], [((), A), (A, ())], [((), ())], A),
    "a weight that is split as rows are is gathered": (
        [(A, ()), (A, ())],
        [(A, ())],
        [(A, ()), ((), ())],
        [(A, ())],
        (),
    ),
    "a gradient is added up before it is split": ([((), A), (A, ())], [(A, ())], [((), A), (A, ())], [((), ())], A),
}


@pytest.mark.parametrize("name", CASES)
def test_dots(name):
    operands, results, need, made, summed = CASES[name]
    found = cut("dot_general", DOT, [(8, 8), (8, 8)], [(8, 8)], operands, results)
    assert (list(found.operands), list(found.results), found.summed) == (need, made, summed)


def test_a_concatenation_is_split_along_another_dim():
    found = cut("concatenate", {"dimension": 1}, [(8, 4), (8, 4)], [(8, 8)], [((), A), ((), A)], [((), A)])
    assert found.operands == ((A, ()), (A, ())) and found.results == ((A, ()),)


def test_an_op_without_a_rule_is_whole():
    found = Partitions(TABLE).of(Op("mystery", (0,), (1,), None, (), 1), [(A, B)], [(A, ())])
    assert found.operands == (((), ()),) and found.results == (((), ()),) and found.summed == ()
