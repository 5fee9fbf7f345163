"""Which dots XLA:CPU runs in 16 bits, against the compiled HLO."""

import re

import jax
import jax.numpy as jnp
import pytest
from support import peak_memory

import sharding
from sharding.memory import usage
from sharding.memory.instruction import all_instructions


def dot(lhs, rhs, batch=()):
    """x, y -> their product, contracting dim `lhs` of x and `rhs` of y."""
    return lambda x, y: jax.lax.dot_general(x, y, (((lhs,), (rhs,)), (batch, batch)))


def transposed(f):
    return lambda x, y: f(x.swapaxes(-1, -2), y)


DOTS = {
    "rows by columns": (dot(1, 0), (16, 4), (4, 16)),
    "columns by columns": (dot(0, 0), (4, 16), (4, 16)),
    "rows by rows": (dot(1, 1), (16, 4), (16, 4)),
    "small": (dot(1, 0), (7, 7), (7, 7)),
    "one column": (dot(1, 0), (64, 64), (64, 1)),
    "batch of rows by columns": (dot(2, 1, (0,)), (4, 16, 8), (4, 8, 16)),
    "batch of columns by columns": (dot(1, 1, (0,)), (4, 8, 16), (4, 8, 16)),
    "transposed": (transposed(dot(1, 0)), (8, 16), (8, 16)),
    "batch, transposed": (transposed(dot(2, 1, (0,))), (4, 8, 16), (4, 8, 16)),
    "batch in the middle": (dot(2, 2, (1,)), (16, 4, 8), (16, 4, 8)),
    "three dims": (dot(2, 0), (4, 16, 8), (8, 16)),
    "three dims, transposed": (transposed(dot(2, 0)), (4, 8, 16), (8, 16)),
    "summed first": (dot(0, 0), (8, 4, 16), (8, 16)),
}


@peak_memory.newest_jax_only
@pytest.mark.parametrize("name", DOTS)
def test_a_16_bit_dot_runs_in_32_bits_where_the_library_does_not_support_it(name):
    f, *shapes = DOTS[name]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    with sharding.mesh({"data": 8}):
        found = usage(sharding.jit(f).complete(*arrays).assignment)
    (predicted,) = [i.itemsize for i in all_instructions(found.program.body) if i.name == "dot_general"]
    compiled = str(jax.jit(f).lower(*arrays).compile().as_text())
    (dtype,) = re.findall(r"= (\w+)\[[\d,]*\]\S* dot\(", compiled)
    assert predicted == {"bf16": 2, "f32": 4}[dtype]
