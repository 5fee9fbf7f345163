"""Latencies of collectives and products, beside what XLA logs for an H100 (`sol_latency_estimator.cc`, JAX 0.12)."""

import pytest

from sharding.cost import gpu_latencies


@pytest.mark.parametrize(
    ("kind", "num_bytes", "num_devices", "microseconds"),
    [
        ("all-reduce", 4, 2, 0.4795),
        ("all-reduce", 8196, 2, 32.1758),
        ("all-reduce", 24064, 2, 35.579),
        ("all-reduce", 26208, 2, 11.466),
        ("all-reduce", 3 * 2**18, 2, 15.72),
        ("all-gather", 2**25, 2, 161.056),
        ("all-gather", 3 * 2**22, 2, 72.336),
        ("reduce-scatter", 2**26, 2, 220.864),
        ("all-to-all", 2**24, 2, 79.392),
        ("all-reduce", 2**10, 64, 5000.0),
        ("all-gather", 2**20, 0, 5000.0),
    ],
)
def test_a_collective_takes_what_xla_says(kind, num_bytes, num_devices, microseconds):
    assert gpu_latencies.collective_us(kind, num_bytes, num_devices) == pytest.approx(microseconds, rel=1e-3)


def test_a_collective_larger_than_any_measured_takes_longer_in_proportion():
    one, two = (gpu_latencies.collective_us("all-reduce", n, 8) for n in (2**31, 2**32))
    assert two == pytest.approx(2 * one)


@pytest.mark.parametrize(
    ("axes", "count"),
    [
        (("model",), 4),
        (("data",), 2),
        (("data", "model"), 8),
        (("slice",), 0),
        (("slice", "model"), 0),
        ((("data", 1, 2),), 2),
        ((("wide", 1, 2),), 0),
        ((("wide", 2, 2),), 2),
        ((), 1),
    ],
)
def test_groups_within_a_host_are_measured(axes, count):
    sizes = {"wide": 4, "model": 4} if "wide" in str(axes) else {"slice": 2, "data": 2, "model": 4}
    assert gpu_latencies.devices_in_host(axes, sizes) == count


def product(rows, columns, summed, *, batch=1, operand=2, itemsize=2):
    return gpu_latencies.Product(
        batch=batch, rows=rows, columns=columns, summed=summed, operand_itemsize=operand, itemsize=itemsize
    )


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ((768, 1536, 16384), 2),
        ((768, 768, 16384), 4),
        ((768, 576, 16384), 4),
        ((192, 768, 16384), 16),
        ((16384, 768, 768), 1),
        ((1024, 1024, 1024), 1),
        ((128, 128, 2**20), 128),
        ((64, 64, 0), 1),
        ((0, 64, 64), 1),
    ],
)
def test_products_with_few_tiles_are_sums_of_several(sizes, parts):
    one = product(*sizes)
    assert one.num_splits == parts and one.is_split == (parts > 1)
    assert one.sum_us == pytest.approx(sizes[0] * sizes[1] * (4 * parts + 2) / gpu_latencies.BYTES_PER_US)


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
    one = product(rows, columns, summed, batch=batch, operand=operand, itemsize=itemsize)
    num_bytes = batch * (operand * summed * (rows + columns) + itemsize * rows * columns)
    assert gpu_latencies.product_us(one, num_bytes) == pytest.approx(microseconds, rel=0.4)
