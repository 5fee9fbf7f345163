"""Straight-line programs: calls are inlined, the numbers are the function's, slices compute what they promise."""

import jax
import jax.numpy as jnp
import numpy as np

from sharding.graph.straight_line import CALLS, trace_program, variables

TABLE = np.arange(4.0, dtype=np.float32)
"""A constant of the program."""


@jax.jit
def inner(x):
    return jax.jit(jnp.sin)(x) + TABLE


def function(x, y):
    first = inner(x)
    second = jax.checkpoint(inner)(first) * 2
    return [second, jax.nn.relu(y), jax.lax.scan(lambda c, _: (c + 1, None), y, None, length=3)[0]]


ARGUMENTS = jnp.linspace(0.0, 1.0, 4), jnp.linspace(-1.0, 1.0, 4)
PROGRAM = trace_program(function, *ARGUMENTS)


def names(eqns):
    return [eqn.primitive.name for eqn in eqns]


def test_calls_are_inlined_and_the_numbers_are_those_of_the_function():
    assert CALLS.isdisjoint(names(PROGRAM.eqns))
    assert names(PROGRAM.eqns).count("sin") == 2 and "scan" in names(PROGRAM.eqns)
    for ours, expected in zip(PROGRAM(*ARGUMENTS), function(*ARGUMENTS), strict=True):
        np.testing.assert_array_equal(ours, expected)


def test_every_variable_is_computed_once():
    made = [var for eqn in PROGRAM.eqns for var in eqn.outvars]
    assert len(made) == len(set(made)) and not {*made} & {*PROGRAM.inputs, *PROGRAM.values}


def test_what_depends_on_an_input():
    x, y = PROGRAM.inputs
    assert [out in PROGRAM.dependents([x]) for out in PROGRAM.outputs] == [True, False, False]
    assert [out in PROGRAM.dependents([y]) for out in PROGRAM.outputs] == [False, True, True]
    assert PROGRAM.dependents([]) == set()


def test_the_equations_that_an_output_needs():
    x, _ = PROGRAM.inputs
    eqns = PROGRAM.required_eqns(PROGRAM.outputs[:1])
    assert names(eqns).count("sin") == 2 and "scan" not in names(eqns)
    one = PROGRAM.subprogram([x], PROGRAM.outputs[:1], eqns)
    np.testing.assert_array_equal(one(ARGUMENTS[0])[0], function(*ARGUMENTS)[0])
    half = next(eqn for eqn in eqns if eqn.primitive.name == "add").outvars
    rest = PROGRAM.required_eqns(PROGRAM.outputs[:1], given=half)
    assert names(rest).count("sin") == 1 and x not in variables(atom for eqn in rest for atom in eqn.invars)
