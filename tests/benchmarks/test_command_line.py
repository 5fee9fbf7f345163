"""Every benchmark says in its `--help` what it measures, also where `head` reads it."""

import sys
from pathlib import Path

import pytest
from support.closed_pipe import run_into_a_closed_pipe

from benchmarks import command_line, figures
from sharding.launch.exit_codes import READER_GONE

ROOT = Path(__file__).parent.parent.parent
MODULES = {name: module for name, module in figures.BENCHMARKS.items() if name != "fuzz"}
QUICK = "rematerialization"


@pytest.mark.parametrize("name", MODULES)
def test_help_says_what_is_measured(name, capsys, monkeypatch):
    module = MODULES[name]
    monkeypatch.setattr("sys.argv", [name, "--help"])
    with pytest.raises(SystemExit, match="^0$"):
        command_line.run(module.main, module.Options, module.__doc__)
    printed = " ".join(capsys.readouterr().out.split())
    assert " ".join(figures.about(module).split()) in printed and "--json" in printed


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == QUICK else [pytest.mark.slow]) for name in (*MODULES, "figures")]
)
def test_help_into_a_closed_pipe(name):
    done = run_into_a_closed_pipe(sys.executable, "-m", f"tests.benchmarks.{name}", "--help", folder=ROOT)
    assert (done.stderr, done.returncode) == ("", READER_GONE)
