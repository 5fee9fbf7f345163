"""Latencies of collectives."""

import pytest

from sharding.cost import gpu_latencies


@pytest.mark.parametrize("kind", gpu_latencies.COLLECTIVES)
def test_a_collective_takes_longer_the_more_it_moves_and_never_less_than_to_start(kind):
    small, large = (gpu_latencies.collective_us(kind, n) for n in (0, 2**30))
    assert 0 < small < large
    assert large - small == pytest.approx(2**10 * (gpu_latencies.collective_us(kind, 2**20) - small))
