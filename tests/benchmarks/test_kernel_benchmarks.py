"""The commands that time kernels, as smoke tests on a CPU."""

import json

import pytest

from . import accelerator, kernels
from .kernel_cases import CASES

LONG = ("attention, 8,192 tokens", "attention, GPT-2 124M", "linear cross entropy, GPT-2 124M")
"""Which run with the slow tests."""


def test_kernels_are_interpreted_on_a_cpu_and_nothing_is_timed(tmp_path, capsys):
    file = tmp_path / "kernels.json"
    kernels.main(kernels.Options(only=("RMS norm",), json=file))
    rows = json.loads(file.read_text())["rows"]
    assert {row["name"] for row in rows} >= {"RMS norm: auto", "RMS norm: mosaic_tpu", "RMS norm, gradients: xla"}
    assert all(row.keys() == {"kind", "name"} and row["kind"] == "smoke test" for row in rows)
    assert "smoke test" in capsys.readouterr().out


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] * (case.name in LONG), id=case.name) for case in CASES],
)
def test_all_implementations_have_the_numbers_of_the_reference(case):
    for has_gradients in (False, True) if case.wrt else (False,):
        rows = [r for r in accelerator.checked(case, has_gradients, is_smoke=True) if r["kind"] == "numbers"]
        assert len(rows) >= 3
        assert max(row["error"] for row in rows) <= accelerator.TOLERANCE


def test_a_wrong_number_fails(monkeypatch):
    def part():
        return [{"kind": "numbers", "name": "norm: fast", "error": 0.5}]

    monkeypatch.setattr(accelerator, "parts", lambda options: [("norm", part)])
    with pytest.raises(SystemExit, match="numbers differ: norm: fast"):
        accelerator.main(accelerator.Options(smoke=True))


def test_without_an_accelerator():
    with pytest.raises(SystemExit, match="no GPU or TPU found"):
        accelerator.main(accelerator.Options())


def test_parts_that_do_not_fit_are_named(monkeypatch, capsys):
    monkeypatch.setattr(accelerator, "parts", lambda options: [("training", None)])
    accelerator.main(accelerator.Options(smoke=True, minutes=-1))
    assert "left out, as -1 minutes are over: training" in capsys.readouterr().out
