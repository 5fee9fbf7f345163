"""Parsing of device descriptions, and the usual shapes."""

import itertools
import math

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


@pytest.mark.parametrize("name", ["v5e", "v5p", "tpu7x"])
def test_the_usual_torus_is_the_most_cubic_one(name):
    """Of all shapes with that many chips the least sum, then the first in order; smallest dim first."""
    known = CHIPS[name]
    for chips in (*range(1, 33), 48, 60, 64):
        sizes = (
            itertools.product(range(1, chips + 1), repeat=2)
            if known.torus_dims == 3
            else [(n,) for n in range(1, chips + 1)]
        )
        heads = (head for head in sizes if chips % math.prod(head) == 0)
        shapes = ((*head, chips // math.prod(head)) for head in heads)
        expected = min(tuple(sorted(shape)) for shape in shapes if sum(shape) == _least_sum(chips, known.torus_dims))
        assert arranged(known, chips * known.devices_per_chip).shape == expected


def _least_sum(chips, num_dims):
    if num_dims == 1:
        return chips
    return min(n + _least_sum(chips // n, num_dims - 1) for n in range(1, chips + 1) if chips % n == 0)


@pytest.mark.parametrize("count", [1, 7, 8, 9, 16, 24])
def test_the_usual_hosts_have_eight_gpus(count):
    if count > 8 and count % 8:
        with pytest.raises(ShardingError, match=f"{count} / 8"):
            arranged("h100", count)
        return
    devices = arranged("h100", count)
    assert devices.shape == ((1, count) if count <= 8 else (count // 8, 8))
    assert arranged(devices, count) is devices and devices.num_devices == count
    assert (devices.num_hosts, devices.devices_per_island) == devices.shape


@pytest.mark.parametrize(
    ("text", "wraps"),
    [
        ("v5p:4x4x6", (False,) * 3),
        ("v5p:12x4x8", (True,) * 3),
        ("v4:4x4x2", (False,) * 3),
        ("v5e:16x4", (True, False)),
        ("v5e:16x32", (True, True)),
        ("v6e:8x8", (False, False)),
        ("tpu7x:4x8x4", (True,) * 3),
    ],
)
def test_a_torus_wraps_in_whole_cubes_or_pods(text, wraps):
    assert parse(text).wraps == wraps


@pytest.mark.parametrize(
    ("text", "nearest"), [("v5p:8", "v5p:8x1x1"), ("v5e:2x3x4x5", "v5e:2x60"), ("v5e:6", "v5e:6x1")]
)
def test_the_nearest_shape_has_as_many_chips(text, nearest):
    with pytest.raises(ShardingError, match="fix") as caught:
        parse(text)
    assert [*caught.value.fix] == [f'"{nearest}"']
    assert math.prod(parse(nearest).shape) == math.prod(int(n) for n in text.partition(":")[2].split("x"))
