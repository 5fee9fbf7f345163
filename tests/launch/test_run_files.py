"""The folder of a run, its console, loss curve and batches: laws and small references, without a model."""

import errno
import io
import itertools
import math
import os
import re
import time
import xml.etree.ElementTree as xml
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console as RichConsole

import sharding
from sharding import P, ShardingError, checkpoint
from sharding.launch import loss_plot, metrics, run_folder, training_loop
from sharding.launch.batch_rows import microbatches, select_rows
from sharding.launch.datasets import digits, standard_library, synthetic_clicks
from sharding.launch.jitted_workload import JittedWorkload
from sharding.launch.progress import NUM_PLAIN_LINES, Console
from sharding.launch.workload import Metric, Sampler, Workload


def saved(out: Path, *steps: int, settings: object = None) -> None:
    with checkpoint.Saver(out / run_folder.CHECKPOINTS, keep=9) as saver:
        for step in steps:
            saver.save(step, {"w": jnp.full(2, step)}, settings)


def test_the_checkpoints_of_an_earlier_run_are_moved_aside(tmp_path: Path):
    before = tmp_path / run_folder.CHECKPOINTS_BEFORE
    for step in (1, 2):
        saved(tmp_path, step)
        run_folder.move_aside(tmp_path)
        assert checkpoint.steps(before) == [step] and not (tmp_path / run_folder.CHECKPOINTS).exists()


def test_newer_checkpoints_are_moved_aside(tmp_path: Path):
    saved(tmp_path, 1, 2, 3, 4)
    run_folder.move_newer_aside(tmp_path, 2)
    before = tmp_path / run_folder.CHECKPOINTS_BEFORE
    assert checkpoint.steps(tmp_path / run_folder.CHECKPOINTS) == [1, 2] and checkpoint.steps(before) == [3, 4]
    saved(tmp_path, 3)
    run_folder.move_newer_aside(tmp_path, 1)
    assert checkpoint.steps(tmp_path / run_folder.CHECKPOINTS) == [1] and checkpoint.steps(before) == [2, 3, 4]
    run_folder.move_aside(tmp_path)
    assert checkpoint.steps(before) == [1] and not (tmp_path / run_folder.CHECKPOINTS).exists()
    run_folder.move_aside(tmp_path)
    assert checkpoint.steps(before) == [1]


def test_settings_that_may_change_on_resume(tmp_path: Path):
    first = {"lr": 1, "mesh": "data=2", "model": {"name": "a", "width": 3}, "text": {"files": ["x"], "vocab": 9}}
    with pytest.raises(ShardingError, match="no checkpoint in this folder"):
        run_folder.check_resumable(tmp_path, first)
    saved(tmp_path, 1, settings=first | {"lr": 7})
    saved(tmp_path, 2, settings=first | {"progress": {"step": 2}})
    run_folder.check_resumable(tmp_path, first)
    free = {"mesh": "data=4", "keep": 7, "out": "y", "text": {"files": [], "vocab": 9, "cache": "z"}}
    run_folder.check_resumable(tmp_path, first | free)
    for change, text in (
        ({"lr": 2}, "lr was 1, is now 2"),
        ({"model": {"name": "a", "width": 4}}, "model.width was 3, is now 4"),
        ({"text": {"files": ["x"], "vocab": 8}}, "text.vocab was 9, is now 8"),
        ({"more": 1}, "more was None, is now 1"),
    ):
        with pytest.raises(ShardingError, match="mesh and devices may differ") as caught:
            run_folder.check_resumable(tmp_path, first | change)
        assert caught.value.found == (text,)
    with pytest.raises(ShardingError, match="lr was 7, is now 1"):
        run_folder.check_resumable(tmp_path, first, 1)
    for file in (tmp_path / run_folder.CHECKPOINTS / "2" / "extra").glob("m*"):
        file.write_text("")
    with pytest.raises(ShardingError, match="lr was 7, is now 1"):  # the newest that is readable
        run_folder.check_resumable(tmp_path, first)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS])
def test_a_full_disk_says_how_to_go_on(number: int, tmp_path: Path):
    with pytest.raises(ShardingError, match="free disk space") as caught, run_folder.disk_errors(tmp_path):
        raise OSError(number, os.strerror(number))
    assert caught.value.found == (os.strerror(number), "no checkpoint") and caught.value.fix == ("free disk space",)
    if number == errno.ENOSPC:
        saved(tmp_path, 4)
        with pytest.raises(ShardingError, match="steps 4") as caught, run_folder.disk_errors(tmp_path):
            raise OSError(number, "full")
        assert caught.value.fix == ("free disk space, then --resume",)


def test_other_errors_stay_what_they_are(tmp_path: Path):
    with pytest.raises(PermissionError, match="no"), run_folder.disk_errors(tmp_path):
        raise PermissionError(errno.EACCES, "no")
    with run_folder.disk_errors(tmp_path):
        pass
    run_folder.make(tmp_path / "a" / "b")
    run_folder.make(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(ShardingError, match="required: a writable folder"):
        run_folder.make(tmp_path / "file")


def workload(**changes: object) -> Workload:
    facts = dict.fromkeys(Workload.__dataclass_fields__)
    facts |= {"loss": Metric(name="loss", unit="nats"), "heldout": (Metric(name="h", unit="%", scale=100, digits=1),)}
    return Workload(**(facts | {"item": "tokens", "items_per_example": 1, "name": "m"} | changes))


def lines(num_steps: int, first: int = 0, *, quiet: bool = False, is_terminal: bool = False) -> list[str]:
    """What a console prints of a run without a terminal."""
    out = io.StringIO()
    rich = RichConsole(file=out, highlight=False, soft_wrap=True, force_terminal=is_terminal, width=80)
    values = {"loss": 1.5, "tokens_per_second": 1234.6, "memory_bytes": 2_000_000}
    with Console(workload=workload(), num_steps=num_steps, first_step=first, quiet=quiet, rich=rich) as console:
        for step in range(first + 1, num_steps + 1):
            console.step(step, values)
        console.heldout(num_steps, {"h": 0.25})
    return out.getvalue().splitlines()


@pytest.mark.parametrize(("num_steps", "first"), [(1, 0), (5, 0), (20, 0), (39, 0), (40, 0), (41, 5), (100, 63)])
def test_about_twenty_progress_lines(num_steps: int, first: int):
    *shown, last = lines(num_steps, first)
    every = max(1, num_steps // NUM_PLAIN_LINES)
    expected = [step for step in range(first + 1, num_steps + 1) if step % every == 0 or step == first + 1]
    assert [int(line.split()[1].split("/")[0]) for line in shown] == expected
    assert shown[0] == f"step {first + 1}/{num_steps}  loss 1.500 nats  1,235 tokens/s  2 MB"
    assert all(re.search(r"  ETA \d+:\d\d$", line) for line in shown[1:])
    assert last == f"step {num_steps}/{num_steps}  held out 25.0 %"


def test_a_terminal_has_a_bar_and_other_processes_nothing():
    assert lines(5, quiet=True) == lines(5, quiet=True, is_terminal=True) == []
    shown = "".join(lines(5, is_terminal=True))
    assert "ETA" in shown and "held out" not in lines(5)[0]
    assert "5/5" in shown and "step 5/5" not in shown and "step 5/5" in "".join(lines(5))  # a bar, and lines


def test_the_time_left(monkeypatch: pytest.MonkeyPatch):
    """From the second step on: the first one compiles."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    console = Console(workload=workload(), num_steps=100, first_step=10, quiet=True)
    now[0] = 500.0
    console.step(11, {"loss": 1.0, "tokens_per_second": 1.0, "memory_bytes": 0})
    assert console._eta(11) == ""
    now[0] = 510.0
    assert console._eta(12) == "  ETA 14:40"  # 88 steps of 10 s
    assert console._eta(15) == "  ETA 3:32"  # 85 of 2.5 s


def test_a_run_starts_before_its_first_step():
    out = io.StringIO()
    rich = RichConsole(file=out, highlight=False, soft_wrap=True, width=80)
    with Console(workload=workload(), num_steps=100, rich=rich) as console:
        console.step(1, {"loss": 1.5, "tokens_per_second": 1.0, "memory_bytes": 0})
    assert out.getvalue().startswith("step 1/100  loss 1.500 nats") and "ETA" not in out.getvalue()


def test_metrics_in_words():
    both = workload(heldout=(Metric(name="a", unit="x"), Metric(name="b", unit="%", scale=100, digits=1)))
    assert both.format_heldout({"a": 1.23456, "b": 0.5}) == "1.235 x  50.0 %"
    assert both.format_heldout({"a": 1.23456, "b": 0.5}, lambda metric: metric.final_digits) == "1.23 x  50.00 %"
    assert both.loss.number(0.5, digits=0) == "0" and both.throughput_name == "tokens_per_second"
    assert (
        workload().format_batch(4) == "4 tokens"
        and replace(both, items_per_example=8).format_batch(4) == "4 x 8 tokens"
    )


def test_when_something_is_due():
    for every in range(5):
        due = [step for step in range(1, 13) if training_loop._due(step, every)]
        assert due == ([] if every == 0 else list(range(every, 13, every)))


@pytest.mark.parametrize("num", [0, 1, 5, 40, 200])
def test_the_running_mean(num: int):
    points = [(k, float(k % 7)) for k in range(num)]
    for share in (0.01, 0.03, 0.1):
        reach = max(1, round(num * share))
        for index, (step, mean) in enumerate(loss_plot.smooth(points, share=share)):
            near = [value for other, (_, value) in enumerate(points) if abs(other - index) <= reach]
            assert step == index and mean == pytest.approx(sum(near) / len(near))


def test_axes_of_the_loss_curve():
    for scale, (low, high) in itertools.product(("linear", "log"), ((1.0, 3.0), (0.01, 300.0))):
        axis = loss_plot.Axis(low=low, high=high, start=10, end=110, scale=scale)
        assert axis.pixel(low) == 10 and axis.pixel(high) == pytest.approx(110)
        middle = (low + high) / 2 if scale == "linear" else math.sqrt(low * high)
        assert axis.pixel(middle) == pytest.approx(60)
    for low, high in ((0.0, 6.0), (1.0, 2.0), (0.0, 1000.0), (-0.3, 0.1)):
        ticks = loss_plot._linear_ticks(low, high)
        steps = {round(b - a, 9) for a, b in itertools.pairwise(ticks)}
        assert len(steps) == 1 and 3 <= len(ticks) <= 8
        (step,) = steps
        assert f"{step:e}"[0] in "125" and float(f"{step:.0e}") == pytest.approx(step)
        assert ticks[0] - step < low <= ticks[0] + 1e-9 and ticks[-1] <= high + 1e-9 < ticks[-1] + step
    assert loss_plot._log_ticks(0.5, 50) == pytest.approx([0.5, 1, 2, 5, 10, 20, 50])


def test_where_the_curve_is_drawn():
    train = [(step, 4.0 / step) for step in range(1, 101)]
    root = xml.fromstring(loss_plot.svg([*train, (101, -1.0)], [(50, 1.0), (100, 0.5)], title="t", unit="u"))
    x_axis, y_axis = loss_plot._axes([*train, (50, 1.0), (100, 0.5)], "linear", "log")
    assert (x_axis.low, x_axis.high, y_axis.low, y_axis.high) == (0.0, 100, 0.04 * 0.96, 4.0 * 1.02)
    assert x_axis.start < x_axis.end and y_axis.start > y_axis.end
    raw, mean, heldout = (each.attrib["points"].split() for each in root.findall("{*}polyline"))
    assert len(raw) == len(mean) == 100 and len(heldout) == 2
    assert raw[0] == f"{x_axis.pixel(1):.1f},{y_axis.pixel(4.0):.1f}"
    assert heldout[1] == f"{x_axis.pixel(100):.1f},{y_axis.pixel(0.5):.1f}"
    x, y = float(heldout[0].split(",")[0]), float(heldout[0].split(",")[1])
    dots = [(float(dot.attrib["cx"]), float(dot.attrib["cy"])) for dot in root.findall("{*}circle")]
    assert dots[0] == (x, y)
    texts = [text.text for text in root.findall("{*}text")]
    assert "held out (0.50)" in texts and {"t", "u", "step", "train"} <= set(texts)
    left = loss_plot._axes([(5, 1.0), (9, 2.0)], "log", "linear")[0]
    assert (left.low, left.high) == (5, 9) and loss_plot._axes([(0, 1.0)], "log", "linear")[0].low == 1


@pytest.mark.parametrize("scales", list(itertools.product(("linear", "log"), repeat=2)))
@pytest.mark.parametrize("points", [[], [(3, 0.5)], [(1, 2.0), (1000, 1e-3)], [(k, 5.0 / (k + 1)) for k in range(90)]])
def test_the_whole_curve_is_inside_the_picture(points: list, scales: tuple):
    x_scale, y_scale = scales
    drawn = loss_plot.svg(points, points[::2], title="t", unit="u", x_scale=x_scale, y_scale=y_scale)
    corners = [(float(dot.get("cx")), float(dot.get("cy"))) for dot in xml.fromstring(drawn).findall("{*}circle")]
    for text in xml.fromstring(drawn).findall("{*}text"):
        moved = re.match(r"translate\(([-\d.]+) ([-\d.]+)\)", text.get("transform", ""))
        corners.append((float(moved[1]), float(moved[2])) if moved else (float(text.get("x")), float(text.get("y"))))
    for line in xml.fromstring(drawn).findall("{*}polyline"):
        corners += [tuple(map(float, pair.split(","))) for pair in line.get("points").split()]
    assert all(0 <= x <= loss_plot.WIDTH and 0 <= y <= loss_plot.HEIGHT for x, y in corners), corners
    assert len({*corners}) >= 6  # nothing on top of something else


@pytest.mark.parametrize(("spec", "shards"), [(P("data"), 4), (P(("data", "fsdp")), 8), (P(None), 1), (P(), 1)])
def test_a_sample_continues_the_first_of_equal_prompts(spec: P, shards: int):
    """One for each shard of a batch, with the key of the seed."""
    seen = {}

    def generate(params, rows, key):
        seen.update(rows=np.asarray(rows), key=key)
        return jnp.concatenate([rows, rows[:, :1] + params + jnp.arange(len(rows))[:, None]], axis=1)

    sampler = Sampler(generate=generate, prompt=np.array([7, 8, 9]), decode=lambda row: " ".join(map(str, row)))
    state = SimpleNamespace(params=1)
    with sharding.mesh(data=4, fsdp=2) as mesh:
        jitted = JittedWorkload(
            workload=workload(sampler=sampler), mesh=mesh, batch_spec=spec, plan=None, completion=None, init=None,
            train_step=None, evaluate=None, generate=generate,
        )  # fmt: skip
        assert jitted.sample(state, seed=5) == "7 8 9 8"
        assert seen["rows"].tolist() == [[7, 8, 9]] * shards and seen["key"] == jax.random.key(5)
        assert replace(jitted, generate=None).sample(state, seed=5) == ""


def test_metrics_without_a_file(tmp_path: Path):
    with metrics.MetricsFile(path=None) as file:
        file.log(3, {"loss": 1.0})
    assert file.series("loss") == [(3, 1.0)]
    with metrics.resume(tmp_path, step=3) as file:
        assert file.lines == []


def test_microbatches_hold_every_row_once():
    for rows, parts in ((8, 1), (8, 2), (12, 3), (4, 4)):
        batch = jnp.arange(rows * 2).reshape(rows, 2)
        found = np.asarray(microbatches(batch, parts))
        expected = [np.asarray(batch)[part::parts] for part in range(parts)]
        np.testing.assert_array_equal(found, expected)
    tree = {"a": np.arange(6), "b": np.arange(12).reshape(6, 2)}
    assert select_rows(tree, None) is tree
    np.testing.assert_array_equal(select_rows(tree, np.array([4, 1]))["b"], [[8, 9], [2, 3]])


def test_images_of_an_epoch_are_seen_once_in_each_order():
    data = digits.read(batch_size=100, seed=3)
    count = len(data.train.labels)
    assert count + len(data.heldout.labels) == 1797 and len(data.heldout.labels) == digits.NUM_HELDOUT
    flat = np.concatenate([data.train_batch(step).images for step in range(2 * count // 100 + 1)])
    for epoch in range(2):
        own = flat[epoch * count : (epoch + 1) * count]
        assert sorted(image.tobytes() for image in own) == sorted(image.tobytes() for image in data.train.images)
    assert (flat[:count] != flat[count : 2 * count]).any()
    rows = np.array([7, 0, 99])
    np.testing.assert_array_equal(data.train_batch(14, rows).images, data.train_batch(14).images[rows])
    assert flat.min() == -1 and flat.max() == 1 and flat.dtype == np.float32
    batches = data.heldout_batches()
    assert [len(batch.labels) for batch in batches] == [100] * 4
    labels = np.concatenate([batch.labels for batch in batches])
    np.testing.assert_array_equal(labels[:360], data.heldout.labels)
    assert (labels[360:] == -1).all() and not batches[-1].images[60:].any()
    np.testing.assert_array_equal(np.concatenate([b.images for b in batches])[:360], data.heldout.images)


def test_clicks_follow_their_model():
    """The log odds with one loop per term, and losses by definition."""
    tables = (3, 5, 2000)
    data = synthetic_clicks.make(numbers=4, tables=tables, batch_size=16, seed=1)
    model, generator = data.model, np.random.default_rng(0)
    clicks, logits = model.draw(generator, 50)
    assert [len(values) for values in model.values] == [3, 5, synthetic_clicks.MAX_DISTINCT]
    assert (clicks.categories < np.array(tables)).all() and clicks.categories.min() == 0
    for row in range(50):
        rows = [int(clicks.categories[row, k]) % len(model.values[k]) for k in range(3)]
        expected = -1.0 + sum(model.values[k][rows[k]] for k in range(3))
        for a, b in itertools.combinations(range(3), 2):
            expected += model.vectors[a][rows[a]] @ model.vectors[b][rows[b]]
        linear = np.random.default_rng(0).standard_normal((50, 4))[row] @ model.weights
        assert logits[row] == pytest.approx(expected + linear)
    clicked = clicks.clicked
    chances = 1 / (1 + np.exp(-logits))
    nats = -np.mean(np.where(clicked > 0.5, np.log(chances), np.log(1 - chances)))
    assert synthetic_clicks.log_loss(logits, clicked) == pytest.approx(nats)
    ties = np.round(logits)
    pairs = [(a > b) + (a == b) / 2 for a in ties[clicked > 0.5] for b in ties[clicked <= 0.5]]
    assert synthetic_clicks.auc(ties, clicked) == pytest.approx(np.mean(pairs))
    np.testing.assert_array_equal(data.train_batch(2, np.array([3])).numbers, data.train_batch(2).numbers[[3]])
    assert (data.train_batch(2).numbers != data.train_batch(3).numbers).any()
    held = data.heldout_batches()
    assert len(held) == synthetic_clicks.NUM_HELDOUT // 16 and {len(batch.clicked) for batch in held} == {16}
    np.testing.assert_array_equal(np.concatenate([batch.clicked for batch in held]), data.heldout.clicked)
    large = synthetic_clicks.make(numbers=1, tables=(2,), batch_size=2**14 + 1, seed=0)
    assert [len(batch.clicked) for batch in large.heldout_batches()] == [2**14 + 1]


def test_windows_of_the_standard_library():
    text = np.arange(50, dtype=np.uint8)
    corpus = standard_library.Corpus(name="x", train=text, heldout=text[:20], num_files=1, sha256="")
    seen = set()
    for step in range(40):
        batch = standard_library.train_batch(corpus, batch_size=4, length=6, seed=0, step=step)
        assert batch.shape == (4, 7) and (np.diff(batch) == 1).all()
        seen |= set(batch[:, 0].tolist())
        rows = np.array([2, 0])
        part = standard_library.train_batch(corpus, batch_size=4, length=6, seed=0, step=step, rows=rows)
        np.testing.assert_array_equal(part, batch[rows])
    assert seen == set(range(44))  # every start from which a window and its last target fit
    starts = [b[:, 0] for b in standard_library.heldout_batches(corpus, batch_size=2, length=6, num_batches=3)]
    np.testing.assert_array_equal(np.concatenate(starts), [0, 2, 5, 7, 10, 13])
