"""Latencies of collectives and products, beside what XLA logs for an H100 (`sol_latency_estimator.cc`, JAX 0.12)."""

import pytest

from sharding.cost import gpu_latencies


@pytest.mark.parametrize("kind", gpu_latencies.COLLECTIVES)
def test_a_collective_takes_longer_the_more_it_moves_and_never_less_than_to_start(kind):
    small, large = (gpu_latencies.collective_us(kind, n) for n in (0, 2**30))
    assert 0 < small < large
    assert large - small == pytest.approx(2**10 * (gpu_latencies.collective_us(kind, 2**20) - small))


@pytest.mark.parametrize(
    ("sizes", "itemsizes", "microseconds"),
    [
        ((1, 4096, 4096, 4096), (4, 4), 340.9),
        ((1, 8192, 8192, 1024), (4, 4), 444.7),
        ((1, 16384, 1024, 4096), (4, 4), 456.0),
        ((1, 4096, 1152, 3456), (4, 4), 100.6),
        ((64, 512, 512, 64), (4, 4), 40.0),
        ((1, 4096, 4096, 4096), (2, 2), 176.2),
        ((1, 8192, 8192, 1024), (2, 2), 200.6),
        ((1, 4096, 1152, 3456), (2, 2), 44.2),
        ((256, 64, 64, 1024), (2, 2), 29.1),
        ((1, 4096, 128, 4096), (2, 2), 476.4),
        ((1, 4096, 4096, 4096), (1, 4), 11274.2),
    ],
)
def test_a_product_takes_about_what_xla_says(sizes, itemsizes, microseconds):
    batch, rows, columns, summed = sizes
    operand, itemsize = itemsizes
    product = gpu_latencies.Product(
        batch=batch, rows=rows, columns=columns, summed=summed, operand_itemsize=operand, itemsize=itemsize
    )
    num_bytes = batch * (operand * summed * (rows + columns) + itemsize * rows * columns)
    assert gpu_latencies.product_us(product, num_bytes) == pytest.approx(microseconds, rel=0.4)
