"""Which checkpoints are kept and called the best: ties, zeros, and everything before in a small reference."""

import itertools
import math
import os
import random
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from sharding import ShardingError, checkpoint
from sharding.checkpoint.directory import first_line
from sharding.checkpoint.retention import Retention


def kept(steps: list[int], figures: dict[int, float], num_newest: int, keep_best: bool) -> set[int]:
    """The newest ones; and of those with the lowest figure the newest."""
    newest_first = sorted(steps, reverse=True)
    found = set(newest_first[:num_newest])
    measured = [step for step in newest_first if not math.isnan(figures.get(step, math.nan))]
    for step in measured if keep_best else ():
        if all(figures[step] <= figures[other] for other in measured):
            return found | {step}
    return found


def test_kept_are_the_newest_and_the_best():
    generator = random.Random(0)
    for num_newest, keep_best, _ in itertools.product(range(1, 5), (True, False), range(20)):
        steps = generator.sample(range(10), generator.randrange(1, 7))
        # Figures of removed steps stay known; few values, so that there are ties.
        figures = {step: generator.choice([0.0, 1.0, 2.0, math.inf, math.nan]) for step in range(10)}
        figures = {step: figure for step, figure in figures.items() if generator.random() < 0.6}
        policy = Retention(figures=figures, num_newest=num_newest, keep_best=keep_best)
        flags = policy.should_preserve([SimpleNamespace(step=step) for step in steps], context=None)
        found = {step for step, is_kept in zip(steps, flags, strict=True) if is_kept}
        assert found == kept(steps, figures, num_newest, keep_best), (steps, figures, num_newest, keep_best)


def small() -> dict:
    return {"a": jnp.zeros(2)}


def test_the_best_of_equal_ones_is_the_newest(tmp_path: Path):
    with checkpoint.Saver(tmp_path, keep=4) as saver:
        for step, figure in enumerate([0.0, 1.0, 0.0, None]):
            saver.save(step, small(), figure=figure)
    assert checkpoint.figures(tmp_path) == {0: 0.0, 1: 1.0, 2: 0.0}
    assert checkpoint.best_step(tmp_path) == 2
    for file in (tmp_path / "2" / "extra").glob("m*"):
        file.write_text("")
    assert checkpoint.figures(tmp_path) == {0: 0.0, 1: 1.0}
    assert checkpoint.best_step(tmp_path) == 0


def test_a_run_that_diverged_is_not_the_best(tmp_path: Path):
    with checkpoint.Saver(tmp_path, keep=1) as saver:
        for step, figure in enumerate([math.nan, 3.0, math.nan, 4.0, math.inf]):
            saver.save(step, small(), figure=figure)
    assert checkpoint.steps(tmp_path) == [1, 4] and checkpoint.best_step(tmp_path) == 1
    checkpoint.save(tmp_path / "other", 0, small(), figure=math.nan).wait()
    assert checkpoint.best_step(tmp_path / "other") is None


def test_one_checkpoint_at_a_time_keeps_the_best_by_default(tmp_path: Path):
    for step, figure in enumerate([2.0, 1.0, 3.0, 4.0]):
        checkpoint.save(tmp_path, step, small(), keep=1, figure=figure).wait()
    assert checkpoint.steps(tmp_path) == [1, 3]
    checkpoint.save(tmp_path, 4, small(), keep=1, figure=5.0, keep_best=False).wait()
    assert checkpoint.steps(tmp_path) == [4]
    for step in (5, 6, 7, 8):
        checkpoint.save(tmp_path, step, small()).wait()
    assert checkpoint.steps(tmp_path) == [4, 6, 7, 8]  # the best, and three


def test_step_zero_and_empty_extras(tmp_path: Path):
    extras = [None, 0, "", [], {"a": {"b": [1, None]}}]
    with checkpoint.Saver(tmp_path, keep=9) as saver:
        for step, extra in enumerate(extras):
            saver.save(step, small(), extra, figure=0.0)
    assert [checkpoint.extra(tmp_path, step) for step in range(5)] == extras
    assert checkpoint.extra(tmp_path) == extras[-1]
    shown = checkpoint.describe(tmp_path, 0)
    assert (shown.step, shown.extra, shown.figure) == (0, None, 0.0)
    files = [Path(folder, name) for folder, _, names in os.walk(tmp_path / "0") for name in names]
    assert shown.disk_bytes == sum(os.path.getsize(file) for file in files) > 0


def test_a_missing_step_names_the_newest_that_exists(tmp_path: Path):
    with checkpoint.Saver(tmp_path) as saver:
        for step in (2, 9, 4):
            saver.save(step, small())
    assert checkpoint.steps(tmp_path) == [2, 4, 9]
    with pytest.raises(ShardingError, match="checkpoint of step 5") as caught:
        checkpoint.extra(tmp_path, 5)
    assert caught.value.found == ("steps 2, 4, 9",) and caught.value.fix == ("step 9",)
    with pytest.raises(ShardingError, match="newest checkpoint in") as caught:
        checkpoint.extra(tmp_path / "none")
    assert caught.value.found == ("no checkpoint",) and caught.value.fix == ("save one first",)


def test_the_first_line_of_an_error():
    assert first_line(ValueError("\n one \n two")) == "one "
    assert first_line(ValueError(" ")) == "ValueError" == first_line(ValueError())
    assert first_line(ValueError(201 * "x")) == 200 * "x"


def test_the_newest_good_step_has_the_requested_arrays(tmp_path: Path):
    """An older checkpoint of other shapes is no advice; one that has more arrays is, for a part."""
    with checkpoint.Saver(tmp_path, keep=4) as saver:
        saver.save(1, {"params": {"w": jnp.ones(3)}, "more": jnp.ones(1)})
        saver.save(2, {"params": {"w": jnp.ones(4)}})
        saver.save(3, {"params": {"w": jnp.ones(3)}})
    for part in (tmp_path / "3" / "arrays").rglob("*"):
        if part.is_file():
            part.write_bytes(b"")
    with pytest.raises(ShardingError, match="step 1, the newest older checkpoint that is not corrupted"):
        checkpoint.restore_named(tmp_path, 3, prefix="params/")
