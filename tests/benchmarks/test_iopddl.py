"""The benchmark of contest problems: limits by name, and a row and table of small files."""

import pytest
from support.planning import five_nodes

from benchmarks import iopddl


@pytest.mark.parametrize(("name", "seconds"), [("A", 60), ("G", 120), ("O", 180), ("P", 240), ("Y", 300), ("small", 7)])
def test_limits(name, seconds):
    assert iopddl.limit_seconds(name, 7) == seconds


def test_a_table_of_small_files(tmp_path, capsys):
    five_nodes().write(tmp_path / "five.json.gz")
    five_nodes(is_chain=True).limited(9).write(tmp_path / "chain.json")
    files = (str(tmp_path / "five.json.gz"), str(tmp_path / "chain.json"))
    iopddl.main(iopddl.Options(files=files, best={"five": 26.0}, json=tmp_path / "out.json"))
    printed = capsys.readouterr().out
    assert "five 26.0" in printed
    assert "chain 33.0" in printed
    (five, chain) = iopddl.result_file.load(tmp_path / "out.json").rows
    text = iopddl.summary(iopddl.result_file.load(tmp_path / "out.json"))
    assert text.startswith("five 26 in 0 s (proven, 1.0000 of the best known); chain 33 in 0 s (proven)")
    assert (five["ratio"], five["gap"], chain["best_known"]) == (1, 0, None)
