"""Bytes on the wire against rings simulated step by step."""

import pytest

from sharding.cost import wire_bytes


def walked(kind, num_bytes, n):
    """Bytes that one device of a ring sends in all steps, chunk by chunk."""
    if kind == "all-to-all":  # one chunk to each other device
        return sum(num_bytes // n for other in range(n) if other)
    if kind == "collective-permute":
        return num_bytes
    rounds = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2}[kind]
    return sum(num_bytes // n for _ in range(rounds) for _ in range(n - 1))


@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute"])
@pytest.mark.parametrize("n", [2, 3, 8])
def test_bytes_are_those_of_a_ring(kind, n):
    assert wire_bytes(kind, 24 * n, n) == walked(kind, 24 * n, n)


def test_one_device_sends_nothing():
    assert wire_bytes("all-reduce", 64, 1) == wire_bytes("collective-permute", 64, 1) == 0
