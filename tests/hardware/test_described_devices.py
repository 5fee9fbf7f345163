"""Parsing of device descriptions, and the usual shapes."""

import pytest

from sharding.errors import ShardingError
from sharding.hardware import CHIPS, Devices, arranged, parse


@pytest.mark.parametrize(
    ("text", "num_devices", "num_hosts", "devices_per_island"),
    [
        ("v5p:4x8x8", 256, None, 256),
        ("v5p:8x16x16", 2048, None, 2048),
        ("v4:2x2x1", 4, None, 4),
        ("v5e:16x16", 256, None, 256),
        ("v6e:8x8", 64, None, 64),
        ("tpu7x:4x4x4", 128, None, 128),
        ("h100:16x8", 128, 16, 8),
        ("a100:8", 8, 1, 8),
        ("h200:2x4", 8, 2, 4),
        ("b200:1x8", 8, 1, 8),
        ("cpu:8", 8, 1, 8),
        (" H100:2X8 ", 16, 2, 8),
    ],
)
def test_counts(text, num_devices, num_hosts, devices_per_island):
    devices = parse(text)
    assert (devices.num_devices, devices.num_hosts) == (num_devices, num_hosts)
    assert devices.devices_per_island == devices_per_island


@pytest.mark.parametrize("text", ["v5p:4x8x8", "v5e:4x4", "h100:16x8", "cpu:1x8"])
def test_round_trip(text):
    assert str(parse(text)) == text
    assert parse(str(parse(text))) == parse(text)


def test_descriptions_are_values():
    assert hash(parse("h100:8")) == hash(Devices(chip=CHIPS["h100"], shape=(1, 8)))
    assert parse("h100:8") == parse("h100:1x8")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h10:16x8", r'fix: +"h100:16x8"'),
        ("v5:4x4", r"required: one of v4, v5e, v5p"),
        ("quantum:8", r"no built-in chip 'quantum'"),
        ("v5p", r'fix: +"v5p:4x4x8"'),
        ("v5p:", r"a 3D torus of chips"),
        ("v5p:4x8", r'fix: +"v5p:4x8x1"'),
        ("v5e:4x4x4", r'fix: +"v5e:4x16"'),
        ("v5e:0x4", r"a 2D torus of chips"),
        ("h100:16x", r"hosts x devices per host"),
        ("h100:2x4x8", r'fix: +"h100:2x32"'),
        ("h100:-1x8", r"hosts x devices per host"),
    ],
)
def test_errors_suggest_the_nearest(text, message):
    with pytest.raises(ShardingError, match=message):
        parse(text)


@pytest.mark.parametrize(
    ("text", "wraps"),
    [
        ("v5p:4x4x8", (True, True, True)),
        ("v5p:2x4x4", (False, False, False)),
        ("v5e:8x16", (False, True)),
        ("v6e:16x16", (True, True)),
        ("h100:2x8", ()),
    ],
)
def test_wraps(text, wraps):
    assert parse(text).wraps == wraps


@pytest.mark.parametrize(
    ("name", "num_devices", "text"),
    [
        ("h100", 4, "h100:1x4"),
        ("h100", 64, "h100:8x8"),
        ("cpu", 12, "cpu:1x12"),
        ("v5p", 256, "v5p:4x8x8"),
        ("v5e", 8, "v5e:2x4"),
        ("tpu7x", 128, "tpu7x:4x4x4"),
        ("v5p:2x2x4", 16, "v5p:2x2x4"),
    ],
)
def test_usual_shapes(name, num_devices, text):
    assert str(arranged(name, num_devices)) == text


@pytest.mark.parametrize(
    ("name", "num_devices", "message"),
    [
        ("h100", 12, r"12 / 8 = 1.5 hosts"),
        ("tpu7x", 3, r"2 devices per chip"),
        ("h100:2x8", 8, r'h100:2x8 is 16 devices(.|\n)*fix: +"h100"'),
        ("h10", 8, r'fix: +"h100"'),
    ],
)
def test_impossible_shapes(name, num_devices, message):
    with pytest.raises(ShardingError, match=message):
        arranged(name, num_devices)
