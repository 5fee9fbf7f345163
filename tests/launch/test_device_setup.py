"""The devices of a run: the axes that they give, how many are asked for, and the meshes that need others."""

import itertools
import math

import jax
import pytest
from support import process_threads

from sharding.distributed import processes
from sharding.errors import ShardingError
from sharding.launch.device_setup import format_axes, set_up_devices
from sharding.launch.elastic_mesh import fewer_devices

AVAILABLE = 8
"""CPU devices of the tests."""


@pytest.fixture
def requested(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of CPU devices that were asked for; those that are there stay."""
    found: list[int] = []
    monkeypatch.setattr(type(jax.config), "update", lambda _, name, value: found.append(value))
    for name in (processes.CPU_DEVICES, processes.ELASTIC, "XLA_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    return found


def test_any_axes_on_any_number_of_devices(requested: list[int]):
    """Sizes that are given stay, an open one is the largest that fits, and what cannot fit is an error."""
    for sizes in itertools.product((-1, 1, 2, 3, 8), (1, 2, 4), (1, 3)):
        axes = dict(zip(("data", "tensor", "pipe"), sizes, strict=True))
        known = math.prod(size for size in sizes if size != -1)
        for num_devices in (None, 1, 2, 5, 8, 9):
            available = min(AVAILABLE, num_devices or AVAILABLE)
            if known > available:
                with pytest.raises(ShardingError, match=f"a mesh of at most {available} devices") as caught:
                    set_up_devices(axes, num_devices=num_devices)
                assert f"= {known}" in caught.value.found[0] and format_axes(axes) in caught.value.asked
                assert f"--mesh data={available}" in caught.value.fix
                assert ("leave --devices out" in caught.value.fix) == bool(num_devices)
                continue
            found = set_up_devices(axes, num_devices=num_devices)
            assert list(found) == list(axes)
            assert all(found[axis] == size for axis, size in axes.items() if size != -1)
            if -1 in sizes:
                (extra,) = (found[axis] for axis, size in axes.items() if size == -1)
                assert extra == max(n for n in range(1, 9) if known * n <= available)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_each_process_asks_for_its_share_of_cpu_devices(count: int, requested: list[int], monkeypatch):
    def each(known, num_devices=None):
        requested.clear()
        process_threads.run(monkeypatch, lambda _: set_up_devices({"data": known}, num_devices=num_devices), count)
        return list(requested)

    for known, num_devices in ((6, None), (7, None), (2, 8), (1, 9)):
        (share,) = {*each(known, num_devices)}
        assert (share - 1) * count < (num_devices or known) <= share * count
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    assert not each(8)  # JAX refuses to be asked in two ways
    monkeypatch.delenv("XLA_FLAGS")
    monkeypatch.setenv(processes.CPU_DEVICES, "4")
    assert not each(8)  # `sharding.initialize` asked for the launcher's number


@pytest.mark.parametrize(("axes", "is_whole"), [({"data": 8}, True), ({"data": -1}, True), ({"data": 4}, False)])
def test_several_processes_need_all_devices(axes: dict[str, int], is_whole: bool, requested, monkeypatch):
    """A process without a device of the mesh would have nothing to do, and could not be waited for."""
    for found in process_threads.run(monkeypatch, lambda _: set_up_devices(axes, num_devices=None), 2):
        if is_whole:
            assert found == {"data": 8}
        else:
            assert isinstance(found, ShardingError) and "--mesh data=8" in found.fix
            assert list(found.found) == ["8 devices of 2 processes; the mesh needs 4 = 4"]
    (alone,) = process_threads.run(monkeypatch, lambda _: set_up_devices(axes, num_devices=None), 1)
    assert alone == {"data": 8 if is_whole else 4}


@pytest.mark.parametrize("axes", [{"data": 16, "tensor": 2}, {"tensor": 64}, {"data": 2, "fsdp": 8, "tensor": -1}])
def test_an_elastic_run_takes_fewer_devices(axes: dict[str, int], requested: list[int], monkeypatch):
    with pytest.raises(ShardingError, match="a mesh of at most 8 devices"):
        set_up_devices(axes, num_devices=None)
    monkeypatch.setenv(processes.ELASTIC, "1")
    found = set_up_devices(axes, num_devices=None)
    assert math.prod(found.values()) == AVAILABLE
    assert found == {axis: abs(size) for axis, size in fewer_devices(axes, AVAILABLE).items()}
    with pytest.raises(ShardingError, match="a mesh of at most 8 devices"):
        set_up_devices({"data": 9}, num_devices=None)  # no half of it is a mesh
