"""Reshards that XLA's partitioner would do by involuntary full rematerialization, with a warning."""

import pytest
from support.involuntary_remat import PROGRAMS, compile_program, predicted_bytes

BORDERS = "a convolution's rows"
"""Its halo exchanges are not in the ledger."""
QUICK = ("two axes onto one dim", "two of three axes", "around a product")


def check(name):
    program = PROGRAMS[name]
    left, decided = compile_program(program, "xla"), compile_program(program, "sharding")
    assert left.warned and not decided.warned
    assert decided.bytes < left.bytes
    if name != BORDERS:
        assert decided.bytes == predicted_bytes(program)


@pytest.mark.parametrize("name", QUICK)
def test_no_full_rematerialization(name):
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in QUICK])
def test_no_full_rematerialization_in_slow_programs(name):
    check(name)
