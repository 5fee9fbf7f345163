"""Rates and links of chips: shared by devices, by type of number, and as the data sheets have them."""

import dataclasses

import pytest

from sharding.hardware import CHIPS, Rates, Wire

RATES = Rates(
    bfloat16_flops_per_second=100.0,
    float32_flops_per_second=50.0,
    exact_float32_flops_per_second=20.0,
    int8_flops_per_second=200.0,
    float8_flops_per_second=300.0,
    vector_flops_per_second=10.0,
)


@pytest.mark.parametrize(
    ("dtypes", "rate", "without_eight_bits"),
    [
        ("int8 uint8 int4 uint4", 200, 100),
        ("float8_e4m3fn float8_e5m2 float4_e2m1fn", 300, 100),
        ("bfloat16 float16", 100, 100),
        ("float32 complex64", 50, 50),
        ("float64 int32 complex128", 5, 5),
    ],
)
def test_the_rate_of_a_matmul_is_that_of_its_type(dtypes, rate, without_eight_bits):
    plain = dataclasses.replace(RATES, int8_flops_per_second=None, float8_flops_per_second=None)
    for dtype in dtypes.split():
        assert RATES.matmul_flops_per_second(dtype) == RATES.matmul_flops_per_second(dtype, "high") == rate
        assert plain.matmul_flops_per_second(dtype) == without_eight_bits
        exact = 20 if dtype in ("float32", "complex64") else rate
        assert RATES.matmul_flops_per_second(dtype, "highest") == exact


def test_what_is_shared_is_divided():
    halves = RATES.shared(2)
    for name, rate in dataclasses.asdict(RATES).items():
        assert getattr(halves, name) == rate / 2
    assert dataclasses.replace(RATES, int8_flops_per_second=None).shared(4).int8_flops_per_second is None
    wire = Wire(bytes_per_second=12.0, num_links=3, latency_seconds=1e-6)
    assert wire.total_bytes_per_second == 36
    assert wire.shared(4) == dataclasses.replace(wire, bytes_per_second=3.0)
    assert wire.shared(4).total_bytes_per_second == 9


@pytest.mark.parametrize(("cores", "devices", "share"), [(8, 8, 1), (8, 9, 9 / 8), (16, 8, 1), (1, 8, 8), (2, 3, 1.5)])
def test_devices_share_cores_where_there_are_more_of_them(cores, devices, share):
    cpu = CHIPS["cpu"]
    found = cpu.on_cores(cores, devices)
    assert found.rates.vector_flops_per_second == pytest.approx(cpu.rates.vector_flops_per_second / share)
    assert found.memory_bytes_per_second == pytest.approx(cpu.memory_bytes_per_second / share)
    assert (found == cpu) == (share == 1)
    calibrated = dataclasses.replace(cpu, shares_cores=False)
    assert calibrated.on_cores(cores, devices) == calibrated


GIB = 2**30
SHEETS = {
    # per chip: memory, usable share of it, GB/s, bf16 and 8-bit TFLOPS, links x GB/s, Gb/s of network
    "v4": (32 * GIB, 30.75 / 32, 1200, 275, (275, None), 6 * 45, 50),
    "v5e": (16 * GIB, 15.75 / 16, 819, 197, (393, None), 4 * 50, 25),
    "v5p": (95 * GIB, 1, 2765, 459, (918, 459), 6 * 100, 50),
    "v6e": (32 * GIB, 31.24 / 32, 1638, 918, (1836, 918), 4 * 100, 100),
    "tpu7x": (192 * GIB, 94.74 / 96, 7380, 2307, (None, 4614), 6 * 100, 100),
    "a100": (80e9, 0.75, 2039, 312, (624, None), 12 * 25, 200),
    "h100": (80e9, 0.75, 3350, 989.4, (1978.9, 1978.9), 18 * 25, 400),
    "h200": (141e9, 0.75, 4800, 989.4, (1978.9, 1978.9), 18 * 25, 400),
    "b200": (180e9, 0.75, 8000, 2250, (4500, 4500), 18 * 50, 400),
}


@pytest.mark.parametrize("name", SHEETS)
def test_numbers_of_the_data_sheets(name):
    memory, usable, gigabytes, bf16, (int8, float8), links, network = SHEETS[name]
    one, count = CHIPS[name], CHIPS[name].devices_per_chip
    rates, near = one.rates, pytest.approx
    assert one.memory_bytes * count == near(memory)
    assert (one.usable_memory_bytes or one.memory_bytes) == near(usable * one.memory_bytes, abs=2)
    assert one.memory_bytes_per_second * count == near(gigabytes * 1e9)
    assert rates.bfloat16_flops_per_second * count == near(bf16 * 1e12)
    for rate, tera in ((rates.int8_flops_per_second, int8), (rates.float8_flops_per_second, float8)):
        assert rate is None if tera is None else rate * count == near(tera * 1e12)
    assert one.wire.total_bytes_per_second * count == near(links * 1e9)
    assert one.network.total_bytes_per_second * count == near(network / 8 * 1e9)
    if one.platform == "tpu":
        assert rates.exact_float32_flops_per_second == near(rates.bfloat16_flops_per_second / 6)
        assert rates.float32_flops_per_second == rates.bfloat16_flops_per_second
        assert (one.wraps_at, one.wraps_together) == ((4, True) if one.torus_dims == 3 else (16, False))
        assert (one.wire.latency_seconds, one.network.latency_seconds) == (near(1e-6), near(1e-5))
        assert one.op_seconds == one.collective_seconds == near(1e-6)
    else:
        assert rates.float32_flops_per_second == near(bf16 / 2 * 1e12, rel=0.03)  # TF32
        assert rates.exact_float32_flops_per_second == rates.vector_flops_per_second
        assert (one.wire.latency_seconds, one.network.latency_seconds) == (near(1.9e-6), near(4e-6))
        assert (one.op_seconds, one.collective_seconds) == (near(3e-6), near(4.4e-6))
        assert one.torus_dims == 0 and not one.shares_cores
    assert one.sends_while_computing and one.core_wire == (None if count == 1 else CHIPS["tpu7x"].core_wire)


def test_the_links_between_the_devices_of_a_chip():
    wire = CHIPS["tpu7x"].core_wire
    assert wire is not None and wire.total_bytes_per_second == 600e9 and wire.num_links == 1
