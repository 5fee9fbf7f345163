"""Calibration writes a file that estimates read; no test depends on the machine's speed."""

import math

import jax
import pytest

from sharding import hardware, mesh
from sharding.cost import KINDS, QUICK, calibrate, collective_seconds, topology
from sharding.cost.calibration import Effort, _rate, fitted
from sharding.errors import ShardingError


def test_a_calibration_is_saved_and_loaded(tmp_path):
    m = mesh(data=2, tensor=2, devices=jax.devices()[:4]).mesh
    lines = []
    calibration = calibrate(m, effort=QUICK, say=lines.append)
    calibration.save(tmp_path / "machine.json")
    chip = hardware.load(tmp_path / "machine.json")
    assert chip == calibration.chip
    # Both axes have the same links and are measured once; the full mesh is another group.
    measured = [(one.kind, one.num_devices, one.link) for one in chip.collectives]
    assert measured == [(kind, size, "shared memory") for size in (2, 4) for kind in KINDS]
    assert not chip.shares_cores
    assert len(lines) == 6 + len(measured)
    rates = chip.rates
    for line, rate in (("bfloat16", rates.bfloat16_flops_per_second), ("elementwise", rates.vector_flops_per_second)):
        (said,) = (text for text in lines if line in text)
        assert f"{rate / 1e9:,.1f} GFLOP/s" in said
    how = calibration.how
    assert (how["num_devices"], how["devices_share_cores"]) == (4, True)
    assert how["mesh"] == {"data": 2, "tensor": 2}
    on = topology(m, str(tmp_path / "machine.json"))
    assert all(collective_seconds(kind, 1 << 12, axis, on) > 0 for kind in KINDS for axis in ("data", "tensor"))


def test_described_devices_are_not_measured():
    with pytest.raises(ShardingError, match="described devices"):
        calibrate(mesh(data=8, devices="h100:1x8").mesh, effort=QUICK)


def test_an_unknown_chip():
    with pytest.raises(ShardingError, match=r"the chip 'h10'(.|\n)*\"h100\""):
        calibrate(mesh(data=8).mesh, like="h10", effort=QUICK)


@pytest.mark.parametrize(("start_seconds", "bytes_per_second"), [(0.0, 1e9), (1e-4, 3e9), (2e-5, 1e12)])
def test_fit_of_exact_points(start_seconds, bytes_per_second):
    points = [(size, start_seconds + size / bytes_per_second) for size in (1e3, 1e5, 1e7)]
    start, rate = fitted(points)
    assert math.isclose(start, start_seconds, abs_tol=1e-9)
    assert math.isclose(rate, bytes_per_second, rel_tol=1e-6)


def test_fit_of_noisy_points_is_physical():
    start, rate = fitted([(1e3, 1e-6), (1e6, 1.1e-2), (2e6, 2.9e-2)])  # least squares gives a negative start
    assert start == 0
    assert 0 < rate < 1e9
    start, rate = fitted([(1e3, 2e-5), (1e6, 1e-5)])  # the larger the faster
    assert start == 1e-5  # no message takes less
    assert 0 < rate < math.inf


@pytest.mark.parametrize(("launch_seconds", "rate"), [(1e-5, 1e12), (1e-6, 1e9)], ids=str)
def test_sizes_grow_until_a_launch_is_negligible(launch_seconds, rate):
    asked = []

    def seconds(size):
        asked.append(size)
        return launch_seconds + size / rate

    found = _rate(float, seconds, 1 << 20, (4, 6), Effort())
    assert found == pytest.approx(rate, rel=0.02)
    assert asked == [(1 << 20) * 4**k for k in range(len(asked))]
    assert len(asked) <= 7


def test_a_calibrated_chip_reaches_what_was_measured(tmp_path):
    known = hardware.chip("h100")
    assert known.matmul_share < 1 > known.memory_share
    hardware.save(known, tmp_path / "machine.json", how={})
    found = hardware.load(tmp_path / "machine.json")
    assert (found.matmul_share, found.memory_share) == (1, 1)
