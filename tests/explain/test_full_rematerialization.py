"""Decided reshards where XLA's partitioner, left alone, gathers whole arrays and warns of it."""

import pytest
from rematerialized import PROGRAMS, moved, predicted_bytes

BORDERS = "a convolution's rows"
"""Whose borders neighbours exchange, which the ledger doesn't count."""
QUICK = ("two axes onto one dim", "two of three axes", "around a product")


def check(name):
    program = PROGRAMS[name]
    left, decided = moved(program, "xla"), moved(program, "sharding")
    assert left.warned and not decided.warned
    assert decided.bytes < left.bytes
    if name != BORDERS:
        assert decided.bytes == predicted_bytes(program)


@pytest.mark.parametrize("name", QUICK)
def test_nothing_is_gathered_whole(name):
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in QUICK])
def test_nothing_is_gathered_whole_elsewhere(name):
    check(name)
