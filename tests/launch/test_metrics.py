import math
import xml.etree.ElementTree as xml

import numpy as np
import pytest

from sharding.launch import loss_plot, metrics


def test_lines_are_flushed_and_exact(tmp_path):
    loss = 1 / 3
    with metrics.start(tmp_path) as file:
        file.log(1, {"loss": loss})
        assert metrics.read(tmp_path / metrics.FILE_NAME) == [{"step": 1, "loss": loss}]
        file.log(1, {"heldout_bits_per_byte": 2.5})
        assert file.series("loss") == [(1, loss)]
        assert file.series("heldout_bits_per_byte") == [(1, 2.5)]


def test_resume_drops_later_lines(tmp_path):
    with metrics.start(tmp_path) as file:
        for step in range(1, 6):
            file.log(step, {"loss": float(step)})
    with metrics.resume(tmp_path, step=3) as file:
        file.log(4, {"loss": 0.5})
    assert metrics.series(metrics.read(tmp_path / metrics.FILE_NAME), "loss") == [(1, 1), (2, 2), (3, 3), (4, 0.5)]


def test_a_truncated_line_is_dropped(tmp_path):
    path = tmp_path / metrics.FILE_NAME
    path.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    assert metrics.read(path) == [{"step": 1, "loss": 2.0}]


def test_bits_per_byte():
    assert metrics.bits_per_byte(math.log(256)) == pytest.approx(8)


def test_memory_is_that_of_a_python_process():
    before = metrics.memory_bytes()
    assert 10e6 < before < 1e12
    pages = np.ones(25_000_000)  # written, so that they are resident
    assert metrics.memory_bytes() > before + 0.8 * pages.nbytes


POINTS = [(step, 8 / step**0.2) for step in range(1, 200)]


@pytest.mark.parametrize("y_scale", ["linear", "log"])
@pytest.mark.parametrize("x_scale", ["linear", "log"])
@pytest.mark.parametrize("train", [POINTS, POINTS[:1], [], [(1, float("nan"))], [(1, 2.0), (2, 2.0)]])
@pytest.mark.parametrize("heldout", [POINTS[::50], []])
def test_the_curve_is_an_svg_picture(train, heldout, x_scale, y_scale):
    picture = loss_plot.svg(train, heldout, title="a < b & c", x_scale=x_scale, y_scale=y_scale)
    root = xml.fromstring(picture)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "nan" not in picture
    assert len(root.findall("{*}circle")) == len(heldout)


def test_points_lie_inside_the_frame():
    root = xml.fromstring(loss_plot.svg(POINTS, POINTS[::50]))
    for line in root.findall("{*}polyline"):
        for point in line.attrib["points"].split():
            x, y = map(float, point.split(","))
            assert loss_plot.LEFT <= x <= loss_plot.WIDTH - loss_plot.RIGHT
            assert loss_plot.TOP <= y <= loss_plot.HEIGHT - loss_plot.BOTTOM


@pytest.mark.parametrize(("low", "high"), [(1.9, 8.1), (2.0, 2.1), (0.01, 300)])
@pytest.mark.parametrize("scale", ["linear", "log"])
def test_ticks_lie_inside_and_are_few(low, high, scale):
    ticks = loss_plot.Axis(low=low, high=high, start=0, end=100, scale=scale).ticks()
    assert 3 <= len(ticks) <= 16
    assert all(low <= tick <= high for tick in ticks)
    assert ticks == sorted(ticks)


def test_steps_are_written_below_the_frame_and_values_beside_it():
    root = xml.fromstring(loss_plot.svg(POINTS, POINTS[::50]))
    texts = list(root.iter("{http://www.w3.org/2000/svg}text"))
    numbers = [one.attrib for one in texts if (one.text or "").replace(".", "").isdigit()]
    steps = [one for one in numbers if one["text-anchor"] == "middle"]
    values = [one for one in numbers if one["text-anchor"] == "end"]
    assert len(steps) > 2 and len(values) > 2
    assert all(float(one["y"]) > loss_plot.HEIGHT - loss_plot.BOTTOM for one in steps)
    assert all(float(one["x"]) < loss_plot.LEFT for one in values)


def test_each_step_has_its_throughput(finished_run):
    """All steps of a run have as many tokens."""
    lines = [line for line in metrics.read(finished_run / metrics.FILE_NAME) if "seconds" in line]
    tokens = [line["tokens_per_second"] * line["seconds"] for line in lines]
    assert len(tokens) > 1 and tokens == pytest.approx([round(tokens[0])] * len(tokens))
