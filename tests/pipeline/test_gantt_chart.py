"""The chart: well-formed SVG, one box per task at its time, and a text alternative."""

import xml.etree.ElementTree as ElementTree

import pytest
from support.all_schedules import GRID, cases_by_schedule, make_schedule

from sharding.pipeline import Schedule, schedules
from sharding.pipeline.gantt_chart import LEFT, MARGIN, ROW, STYLES, TOP, WIDEST

SVG = "{http://www.w3.org/2000/svg}"


def drawn(schedule, **times):
    simulation = schedule.simulate(**times)
    return simulation, ElementTree.fromstring(simulation.plot().svg)


@pytest.mark.parametrize(*cases_by_schedule(GRID[::5]))
def test_a_box_per_task(cases):
    for case in cases:
        check_boxes(make_schedule(*case))


def check_boxes(schedule):
    simulation, root = drawn(schedule)
    groups = root.findall(f"{SVG}g")
    scale = (float(root.get("width")) - LEFT - MARGIN) / simulation.makespan
    assert len(groups) == sum(map(len, schedule.orders))
    for one, group in zip(schedule.located(), groups, strict=True):
        box, start = group.find(f"{SVG}rect"), simulation.starts[one.device][one.position]
        taken = simulation.ends[one.device][one.position] - start
        assert float(box.get("x")) == pytest.approx(LEFT + start * scale, abs=1.0)
        assert float(box.get("width")) == pytest.approx(taken * scale, abs=1.0)
        assert float(box.get("y")) == TOP + ROW * one.device
        assert group.find(f"{SVG}title").text.startswith(str(one.task))
        assert group.find(f"{SVG}text").text == one.task.label


@pytest.mark.parametrize("forward", [0.01, 0.3, 1.0, 7.0, 12345.0])
def test_the_axis_tells_the_time_where_it_is(forward):
    """In equal steps from 0, as far as the chart goes."""
    simulation, root = drawn(schedules.gpipe(stages=3, microbatches=4), forward=forward, backward=1.7 * forward)
    scale = (float(root.get("width")) - LEFT - MARGIN) / simulation.makespan
    below = TOP + ROW * 3
    numbers = [text for text in root.findall(f"{SVG}text") if text.text[0].isdigit() and float(text.get("y")) >= below]
    times = [float(text.text) for text in numbers]
    assert len(times) > 2 and times == pytest.approx([k * times[1] for k in range(len(times))])
    assert times[-1] <= simulation.makespan < times[-1] + times[1] * 1.01
    for time, text in zip(times, numbers, strict=True):
        assert float(text.get("x")) == pytest.approx(LEFT + time * scale, abs=1.0)


def test_text_alternative():
    simulation, root = drawn(schedules.zb_h1(stages=2, microbatches=2))
    assert root.get("role") == "img"
    assert root.find(f"{SVG}title").text == "Schedule zb_h1: 2 stages, 2 microbatches, 2 devices"
    told = root.find(f"{SVG}desc").text
    assert f"Makespan {simulation.makespan:g}." in told
    assert "Device 0, from 0 to 7: F0 F1 I0 W0 I1 W1." in told
    assert "Device 1, from 1 to 7: F0 I0 F1 I1 W0 W1." in told


def test_kinds_differ_without_colours():
    """By letter and border."""
    borders = {style.partition("stroke=")[2] for style in STYLES.values()}
    assert len(borders) == len(STYLES)
    _, root = drawn(schedules.dualpipe_v(stages=2, microbatches=4))
    words = [text.text for text in root.findall(f"{SVG}text")]
    assert {"F forward", "B backward", "I backward-input", "W backward-weight"} <= set(words)
    _, root = drawn(schedules.gpipe(stages=2, microbatches=4))
    assert "W backward-weight" not in [text.text for text in root.findall(f"{SVG}text")]


def test_stages_are_named_where_a_device_has_several():
    _, root = drawn(schedules.interleaved(stages=2, microbatches=2))
    assert {"s0", "s1", "s2", "s3"} <= {text.text for text in root.iter(f"{SVG}text")}
    _, root = drawn(schedules.gpipe(stages=2, microbatches=2))
    assert "s0" not in {text.text for text in root.iter(f"{SVG}text")}


def test_a_long_schedule_is_not_endlessly_wide():
    _, root = drawn(schedules.gpipe(stages=2, microbatches=1000))
    assert float(root.get("width")) <= WIDEST + LEFT + MARGIN
    simulation, root = drawn(schedules.gpipe(stages=1, microbatches=1), forward=0.0, backward=0.0)
    assert simulation.makespan == simulation.bubble_fraction == 0.0


def test_names_are_escaped():
    plain = schedules.gpipe(stages=1, microbatches=1)
    _, root = drawn(Schedule(name="<a & b>", orders=plain.orders, stages=1, microbatches=1))
    assert "<a & b>" in root.find(f"{SVG}title").text


def test_jupyter_and_files(tmp_path):
    chart = schedules.gpipe(stages=2, microbatches=2).simulate().plot()
    assert chart._repr_svg_() == str(chart) == chart.svg
    chart.save(tmp_path / "s.svg")
    assert (tmp_path / "s.svg").read_text() == chart.svg
