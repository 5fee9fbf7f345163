"""Calibration files: round trip, and errors that name every fault."""

import json
import math
from dataclasses import replace

import pytest

from sharding.errors import ShardingError
from sharding.hardware import CHIPS, Devices, MeasuredCollective, arranged, load, save

MEASURED = replace(
    CHIPS["cpu"],
    rates=replace(CHIPS["cpu"].rates, float32_flops_per_second=3e10),
    memory_bytes_per_second=2e9,
    op_seconds=1e-5,
    shares_cores=False,
    collectives=(
        MeasuredCollective(
            kind="all-reduce", link="shared memory", num_devices=8, start_seconds=0.0, bytes_per_second=1e9
        ),
    ),
)


def test_round_trip(tmp_path):
    path = tmp_path / "folder" / "machine.json"
    save(MEASURED, path, how={"devices": 8})
    assert load(path) == MEASURED
    assert arranged(str(path), 8) == Devices(chip=MEASURED, shape=(1, 8))
    table = json.loads(path.read_text())
    assert table["measured"] == {"devices": 8}
    path.write_text(json.dumps({name: table[name] for name in ("format", "version", "chip")}))
    assert load(path) == replace(CHIPS["cpu"], shares_cores=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "x"}, 'another format(.|\n)*a calibration file with "format"'),
        ({"version": 2}, "version 2(.|\n)*version 1, which this release reads"),
        ({"chip": "h10"}, 'fix: +"h100"'),
        ({"op_seconds": -1}, "op_seconds: -1"),
        ({"rates": {"float32_flops_per_second": "fast", "x": 1}}, "float32_flops_per_second: 'fast'\n.*entry 'x'"),
        ({"rates": []}, "rates: not an object"),
        ({"speed": 1}, "unknown entry 'speed'"),
        ({"collectives": {}}, "collectives: not a list"),
        ({"collectives": [{"kind": "all-reduce"}]}, r"collectives\[0\]: not an object with kind, link"),
        (
            {
                "collectives": [
                    {"kind": 1, "link": "x", "num_devices": 1, "start_seconds": 0, "bytes_per_second": math.inf}
                ]
            },
            "kind: 1\n.*link: 'x'\n.*num_devices: 1\n.*bytes_per_second: inf",
        ),
    ],
)
def test_errors(tmp_path, changes, message):
    path = tmp_path / "machine.json"
    save(MEASURED, path, how={})
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ShardingError, match=message):
        load(path)


def test_unreadable_file(tmp_path):
    with pytest.raises(ShardingError, match=r"No such file(.|\n)*sharding calibrate --out"):
        load(tmp_path / "none.json")
    (tmp_path / "text.json").write_text("not")
    with pytest.raises(ShardingError, match="invalid JSON"):
        load(tmp_path / "text.json")
