"""Rows and summaries from step times, without running any contender."""

import pytest

from benchmarks import axes, pipeline, result_file
from benchmarks.contenders import Times


def times(name: str, *seconds: float, num_devices: int = 4, num_processes: int = 1) -> Times:
    return Times(name=name, num_devices=num_devices, num_processes=num_processes, seconds=list(seconds))


def by_name(*found: Times) -> dict[str, Times]:
    return {each.name: each for each in sorted(found, key=lambda each: each.median)}


def test_a_row_has_quartiles_and_the_worst():
    row = times("ours, data", 1.0, 2.0, 3.0, 4.0, 9.0).as_row()
    assert row == {
        "kind": "step time",
        "name": "ours, data",
        "num_devices": 4,
        "num_processes": 1,
        "median_seconds": 3.0,
        "low_seconds": 2.0,
        "high_seconds": 4.0,
        "worst_seconds": 9.0,
    }


@pytest.mark.parametrize("peer", [True, False])
def test_axes(peer: bool):
    found = [times("ours, data", 2.0, 2.0), times("ours, single", 4.0, 4.0, num_devices=1)]
    if peer:
        found += [times(f"PyTorch, {name}", seconds) for name, seconds in {"data": 8.0, "single": 5.0}.items()]
        found += [times("PyTorch, data, compiled", 4.0)]
    options = axes.Options(axes=("fsdp",))
    found = [times(each.name.replace("data", "fsdp"), *each.seconds) for each in found]
    rows = axes.ratio_rows(options, by_name(*found))
    text = axes.summary(result_file.measured("axes", options, rows))
    ours = "fsdp: 0.50 (0.50-0.50, worst 0.50) of one device's step"
    torch = ", PyTorch 0.80 (0.80-0.80, worst 0.80) of its own, 0.50 (0.50-0.50, worst 0.50) of PyTorch's"
    assert text == ours + torch * peer


def test_pipeline_compares_the_best():
    found = by_name(
        times("ours, 1f1b, mpmd", 3.0),
        times("ours, zb_v, mpmd", 2.0),
        times("ours, single", 4.0),
        times("PyTorch, zbv", 8.0, num_processes=4),
        times("PyTorch, single", 5.0),
        times("PyTorch, single, compiled", 4.0),
    )
    rows = pipeline.ratio_rows(found)
    assert [(row["ours"], row["other"], row["median"]) for row in rows] == [
        ("ours, zb_v, mpmd", "ours, single", 0.5),
        ("PyTorch, zbv", "PyTorch, single, compiled", 2.0),
        ("ours, zb_v, mpmd", "PyTorch, zbv", 0.25),
    ]
    idle = [
        {"kind": "idle share", "name": "1f1b", "num_devices": 2, "difference_percent": each} for each in (1.5, -2.0)
    ]
    text = pipeline.summary(result_file.measured("pipeline", pipeline.Options(), [*rows, *idle]))
    assert text.startswith("best steps: ours (zb_v, mpmd) over ours (single) 0.50")
    assert text.endswith("idle share as simulated within 2.0 points for 2 schedules on 2 devices")
