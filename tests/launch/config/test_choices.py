"""The command line offers exactly the library's models, schedules, executors, attentions and commands."""

import itertools
import re
from typing import get_args

import pytest

from sharding import launch, pipeline, sequence
from sharding.launch import workloads
from sharding.launch.commands.launch import SHARDING_COMMANDS
from sharding.launch.config.mesh_config import BATCH_AXES, MESH_AXES
from sharding.launch.config.pipeline_config import SCHEDULES


def help_text(capsys: pytest.CaptureFixture[str], command: str) -> str:
    with pytest.raises(SystemExit, match="0"):
        launch.parse([command, "--help"])
    return " ".join(re.sub("[\u2500-\u257f]", " ", capsys.readouterr().out).split())


def choices(text: str, option: str) -> list[str]:
    found = re.search(rf"--{option} \{{None,([^}}]*)\}}", text)
    assert found, text
    return [name.strip() for name in found[1].split(",")]


def expanded(name: str) -> list[str]:
    """The names of a pattern such as `{a,b}-c`."""
    parts = [part.strip("{}").split(",") for part in re.findall(r"\{[^}]*\}|[^{}]+", name)]
    return ["".join(pieces) for pieces in itertools.product(*parts)]


@pytest.mark.parametrize("command", ["train", "explain"])
def test_choices_are_those_of_the_library(command: str, capsys: pytest.CaptureFixture[str]):
    text = help_text(capsys, command)
    assert choices(text, "schedule") == list(SCHEDULES)
    assert choices(text, "executor") == list(get_args(pipeline.Executor))
    assert choices(text, "attention") == list(get_args(sequence.Kind))


@pytest.mark.parametrize("command", ["train", "explain"])
def test_the_help_lists_every_preset(command: str, capsys: pytest.CaptureFixture[str]):
    listed = help_text(capsys, command).split("Preset: ")[1].split(". (default")[0].replace(" train in minutes", "")
    patterns = re.findall(r"(?:\{[^}]*\}|[\w-])+", "".join(listed.split()))
    assert sorted(itertools.chain.from_iterable(map(expanded, patterns))) == sorted(workloads.PRESETS)


def test_every_other_schedule_is_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="2"):
        launch.parse(["train", "--schedule", "dapple"])
    assert "dapple" in capsys.readouterr().err


def test_launch_knows_the_other_commands():
    assert sorted(SHARDING_COMMANDS) == sorted(launch.COMMANDS.keys() - {"launch"})


@pytest.mark.parametrize("command", ["train", "explain"])
def test_the_help_lists_every_axis(command: str, capsys: pytest.CaptureFixture[str]):
    assert f"{', '.join(MESH_AXES[:-1])} and {MESH_AXES[-1]}" in help_text(capsys, command)
    assert set(BATCH_AXES) < set(MESH_AXES)
