"""Times of products against those that XLA logs, and how it splits them."""

import pytest

from sharding.cost import gpu_latencies

LOGGED = [
    # Batch, rows, columns, contracted elements, bytes per operand element and result element, microseconds.
    ((1, 16384, 2048, 1024, 2, 2), 113.7),
    ((1, 16384, 1024, 512, 2, 2), 48.4),
    ((1, 8192, 8192, 2048, 2, 2), 373.7),
    ((64, 1024, 1024, 128, 2, 2), 79.2),
    ((64, 128, 1024, 1024, 2, 2), 71.2),
    ((64, 1024, 1024, 128, 2, 4), 2744.3),
]


@pytest.mark.parametrize(("sizes", "microseconds"), LOGGED)
def test_times_of_products_are_near_those_in_the_log_of_xla(sizes, microseconds):
    *dims, operand, result = sizes
    assert gpu_latencies.product_us(*dims, operand, operand, result) == pytest.approx(microseconds, rel=0.25)


@pytest.mark.parametrize(
    ("sizes", "splits"), [((1024, 1536, 16384), 2), ((512, 1024, 16384), 4), ((1024, 2048, 16384), 1)]
)
def test_products_are_split_as_compiled(sizes, splits):
    """The gradients of a model's weights, as an H100 program has them."""
    assert gpu_latencies.num_splits(1, *sizes, 2, 2, 2) == splits
