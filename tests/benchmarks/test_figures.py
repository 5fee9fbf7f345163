"""README and tables have the figures of the result files, and no others."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import figures, result_file
from benchmarks.ratios import Ratio, unknown
from benchmarks.result_file import FOLDER, Result

ROOT = Path(__file__).parent.parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
FIELDS = list(Result.__dataclass_fields__)
# "0.97 times", "2x faster", "within 5 %", "in 61 of 68", "1.4 s on two cores", "speedup of 3".
TYPED = re.compile(
    r"\d(\.\d+)? ?(times|x) (as|that|the|its|faster|slower|less|more)\b|\bwithin \d+(\.\d+)? ?%|\bratios? (of )?\d+\.\d"
    r"|\b\d+(\.\d+)? ?% (faster|slower|less|more)\b|\bin \d+ of \d+\b|\b(minutes?|seconds?|s) (on|of) \w+ cores?\b",
)


def test_readme_and_tables_are_as_the_command_writes_them():
    assert not figures.stale()


def test_a_changed_figure_is_found(monkeypatch, tmp_path):
    changed = tmp_path / "README.md"
    changed.write_text(re.sub(r"(median|exact in) (\d+)", r"\1 9\2", figures.README.read_text()))
    monkeypatch.setattr(figures, "README", changed)
    assert figures.stale() == [changed]


def test_a_readme_without_its_table_is_an_error(monkeypatch, tmp_path):
    changed = tmp_path / "README.md"
    changed.write_text("# sharding\n")
    monkeypatch.setattr(figures, "README", changed)
    with pytest.raises(ValueError, match="no table between"):
        figures.readme()


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_every_result_file_has_the_format(path: Path):
    stored = json.loads(path.read_text())
    assert list(stored) == FIELDS
    assert stored["benchmark"] in figures.BENCHMARKS and stored["rows"]
    assert path.name.startswith(stored["benchmark"])
    assert re.fullmatch(r"\d+\.[\d.]+( and \d+\.[\d.]+)*", stored["jax"])


def prose() -> dict[str, str]:
    """Where figures could be typed: the README outside its table, and the notebooks' text."""
    before, _, rest = figures.README.read_text().partition(figures.BEGIN)
    found = {"README.md": before + rest.partition(figures.END)[2]}
    for path in NOTEBOOKS:
        cells = json.loads(path.read_text())["cells"]
        found[path.name] = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    return found


@pytest.mark.parametrize("name, text", prose().items(), ids=prose())
def test_no_figure_is_typed(name: str, text: str):
    found = [match.group() for match in TYPED.finditer(text.replace("\n", " "))]
    assert not found, f"{name}: write these from result files, or name the command that measures them: {found}"


@pytest.mark.parametrize(
    "text",
    [
        "a step takes 0.97 times that of one device",
        "compiles 2x faster",
        "peak memory within 10 % of the compiled one",
        "bytes are as predicted in 139 of 144",
        "about three minutes on two cores",
        "the median ratio 0.95",
    ],
)
def test_typed_figures_are_found(text: str):
    assert TYPED.search(text)


def test_ratios():
    pairs = Ratio.of_pairs([2.0, 3.0, 4.0], [1.0, 2.0, 4.0])
    assert (pairs.low, pairs.median, pairs.high, pairs.worst) == (1.25, 1.5, 1.75, 2.0)
    assert Ratio.of_all([1.0, 3.0], [1.0]) == Ratio.of_pairs([1.0, 3.0], [1.0, 1.0])
    assert str(pairs) == "1.50 (1.25-1.75, worst 2.00)" and unknown([pairs]) == ""
    bare = Ratio(median=1.5, low=None, high=None, worst=None)
    assert str(bare) == "1.50" and unknown([pairs, bare]) == "; quartiles and worst unknown"
    assert Ratio.of_row({"kind": "ratio", **pairs.as_row()}) == pairs


def test_a_result_survives_its_file(tmp_path: Path):
    found = result_file.measured("step", figures.Options(), [{"name": "a", "median": 1.0}])
    found.save(tmp_path / "found.json")
    assert result_file.load(tmp_path / "found.json") == found
    assert found.named("a")["median"] == 1.0
    assert found.cores and found.device and f"{found.num_devices} devices" in found.where


def test_what_was_not_recorded_is_unknown():
    bare = dict.fromkeys(FIELDS) | {"benchmark": "step", "jax": "0.12.0.1", "platform": "cpu", "rows": []}
    assert Result(**bare).where == "JAX 0.12.0.1, cpu, unknown devices, unknown processes, machine unknown"


@pytest.mark.parametrize("argv", [["--steps", "3", "--json", "x.json"], ["--json=x.json", "--steps", "3"]])
def test_the_command_has_no_output_file(argv, monkeypatch):
    monkeypatch.setattr("sys.argv", [str(ROOT / "tests/benchmarks/step.py"), *argv])
    monkeypatch.setitem(result_file.sys.modules, "__main__", object())
    assert result_file.command() == "python tests/benchmarks/step.py --steps 3"
