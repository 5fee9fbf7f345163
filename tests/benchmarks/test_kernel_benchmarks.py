"""The commands that time kernels, as smoke tests on a CPU."""

import dataclasses
import json

import pytest

from . import accelerator, gpt2, kernels, result_file
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
    for has_gradients in case.directions:
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


def test_training_of_a_gpt_says_what_was_predicted(capsys):
    options = gpt2.Options(smoke=True, batch=2, runs=1, kernels=("xla",), peer="no-such-python")
    (row,) = gpt2.contenders(options)
    assert "PyTorch left out: no-such-python has none for cpu" in capsys.readouterr().out
    assert row["name"] == "ours, kernels xla" and "seconds" not in row
    assert row["predicted_peak_bytes"] == pytest.approx(row["compiled_peak_bytes"], rel=0.1)


def test_the_summary_compares_training_and_operations():
    (file,) = result_file.FOLDER.glob("accelerator-nvidia-h200-*.json")
    result = result_file.load(file)
    found = accelerator.summary(result)
    assert found.startswith("GPT-2 124M: ") and "of PyTorch's compiled one" in found and "RMS norm " in found
    left_out = dataclasses.replace(result, rows=result.of_kind("kernel"))
    assert accelerator.summary(left_out).startswith("`auto` over the fastest implementation: ")
