"""The memory formula against table 1 of the ZeRO paper."""

import pytest

from sharding import ShardingError, zero

GB = 1e9
TABLE = {  # devices: GB of stages 1 to 3 for 7.5, 128 and 1000 billion parameters
    1: ((120, 120, 120), (2048, 2048, 2048), (16000, 16000, 16000)),
    4: ((52.5, 41.3, 30), (896, 704, 512), (7000, 5500, 4000)),
    16: ((35.6, 21.6, 7.5), (608, 368, 128), (4750, 2875, 1000)),
    64: ((31.4, 16.6, 1.88), (536, 284, 32), (4187, 2218, 250)),
    256: ((30.4, 15.4, 0.47), (518, 263, 8), (4046, 2054, 62.5)),
    1024: ((30.1, 15.1, 0.12), (513, 257, 2), (4011, 2013, 15.6)),
}


@pytest.mark.parametrize("devices", TABLE)
def test_published_table(devices):
    for num_params, row in zip((7.5e9, 128e9, 1e12), TABLE[devices], strict=True):
        for stage, expected in enumerate(row, 1):
            found = zero.model_state_bytes(num_params, devices, stage) / GB
            assert found == pytest.approx(expected, rel=5e-3, abs=5e-3)  # the digits published


def test_stage_0_takes_sixteen_bytes_per_parameter():
    assert zero.model_state_bytes(10, 8, 0) == 160
    assert zero.model_state_bytes(10, 5, 3, param_bytes=4, gradient_bytes=4, optimizer_bytes=8) == 32


@pytest.mark.parametrize(("devices", "stage", "words"), [(4, 4, "one of 0, 1, 2, 3"), (0, 1, "at least 1")])
def test_errors(devices, stage, words):
    with pytest.raises(ShardingError, match=words):
        zero.model_state_bytes(1, devices, stage)
