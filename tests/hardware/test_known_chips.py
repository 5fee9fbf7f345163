"""Consistency of the built-in chips' numbers, among themselves and with data sheet totals."""

import pytest

from sharding.errors import ShardingError
from sharding.hardware import CHIPS, chip, recognised


@pytest.mark.parametrize("name", CHIPS)
def test_chips_are_named_and_have_memory(name):
    known = chip(name.upper())
    assert known.name == name
    assert known.memory_bytes is None if name == "cpu" else known.memory_bytes >= 16 * 10**9


@pytest.mark.parametrize("known", CHIPS.values(), ids=CHIPS)
def test_numbers_of_a_chip_are_consistent(known):
    rates = known.rates
    assert rates.bfloat16_flops_per_second >= rates.float32_flops_per_second >= rates.exact_float32_flops_per_second
    assert rates.matmul_flops_per_second("int8") >= rates.matmul_flops_per_second("bfloat16")
    assert rates.matmul_flops_per_second("float32", "highest") <= rates.matmul_flops_per_second("float32")
    assert known.memory_bytes_per_second >= known.wire.bytes_per_second
    assert known.wire.total_bytes_per_second > 0
    assert known.host_wire.total_bytes_per_second < known.memory_bytes_per_second
    assert (known.wire.num_links == 2 * known.torus_dims) if known.torus_dims else not known.wraps_at
    assert known.wire.latency_seconds <= known.network.latency_seconds


@pytest.mark.parametrize(
    ("name", "giga"), [("v5p", 1200), ("v5e", 400), ("v6e", 800), ("tpu7x", 1200), ("a100", 600), ("h100", 900)]
)
def test_links_sum_to_the_bidirectional_total_of_the_data_sheets(name, giga):
    known = CHIPS[name]
    assert 2 * known.wire.total_bytes_per_second * known.devices_per_chip == giga * 1e9


def test_unknown_chip():
    with pytest.raises(ShardingError, match=r'the chip \'h10\'(.|\n)*fix: +"h100"'):
        chip("h10")


@pytest.mark.parametrize(
    ("platform", "kind", "name"),
    [
        ("tpu", "TPU v5 lite", "v5e"),
        ("tpu", "TPU v5", "v5p"),
        ("tpu", "TPU7x", "tpu7x"),
        ("gpu", "NVIDIA H100 80GB HBM3", "h100"),
        ("gpu", "NVIDIA A100-SXM4-80GB", "a100"),
        ("cpu", "cpu", "cpu"),
    ],
)
def test_real_devices_are_recognised(platform, kind, name):
    found = recognised(platform, kind)
    assert found is not None
    assert found.name == name


def test_other_devices_are_not_recognised():
    assert recognised("gpu", "NVIDIA GeForce RTX 2080") is None


def test_virtual_devices_share_cores():
    cpu = CHIPS["cpu"].on_cores(2, 8)
    assert cpu.rates.float32_flops_per_second == CHIPS["cpu"].rates.float32_flops_per_second / 4
    assert cpu.rates.int8_flops_per_second is None
    assert cpu.memory_bytes_per_second == CHIPS["cpu"].memory_bytes_per_second / 4
    assert CHIPS["cpu"].on_cores(16, 8) == CHIPS["cpu"]
    assert CHIPS["h100"].on_cores(2, 8) == CHIPS["h100"]
