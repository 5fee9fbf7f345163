"""Aligned text, rules and units, compared with what they mean."""

import random

import pytest

from sharding.display import Column, Table
from sharding.display.text_table import MAX_RULE, aligned, ruled
from sharding.display.units import bytes_text, seconds_text


def test_every_cell_ends_or_begins_where_its_column_does():
    generator = random.Random(0)
    for _ in range(50):
        num = generator.randrange(1, 5)
        rows = [["x" * generator.randrange(1, 9) for _ in range(num)] for _ in range(generator.randrange(1, 6))]
        right = {k for k in range(num) if generator.random() < 0.5}
        widths = [max(len(row[k]) for row in rows) for k in range(num)]
        for row, line in zip(rows, aligned(rows, right=right), strict=True):
            begin = 0
            for k, cell in enumerate(row):
                end = begin + widths[k]
                at = end - len(cell) if k in right else begin
                assert line[at : at + len(cell)] == cell
                assert not line[begin:end].replace(cell, "", 1).strip() and not line[end : end + 2].strip()
                begin = end + 2
            assert line == line.rstrip() and len(line) <= begin - 2


def test_a_rule_is_as_long_as_the_table_but_no_longer_than_a_line():
    assert ruled([["a", "bb"], ["ccc", "d"]]) == ["a    bb", "-" * 7, "ccc  d"]
    assert ruled([["x" * 500], ["y"]])[1] == "-" * MAX_RULE


def test_units_begin_at_a_thousand():
    for power, unit in enumerate(("kB", "MB", "GB", "TB"), 1):
        assert bytes_text(1000**power) == f"1 {unit}" and bytes_text(1000 ** (power + 1) // 2).startswith("500 ") | (
            unit == "TB"
        )
        assert bytes_text(1234 * 1000 ** (power - 1)) == f"1.23 {unit}"
    assert [bytes_text(n) for n in (0, 1, 999)] == ["0 bytes", "1 bytes", "999 bytes"]
    assert bytes_text(5 * 10**15) == "5000 TB"
    assert [seconds_text(t) for t in (0, 1e-7, 1e-6, 1e-3, 1, 2.5, 1234.5)] == [
        "0 us", "0.1 us", "1 us", "1 ms", "1 s", "2.5 s", "1230 s",
    ]  # fmt: skip


@pytest.mark.parametrize("num", [0, 1, 19, 20, 21, 40])
def test_rows_that_a_notebook_leaves_out_are_counted(num: int):
    text = Table("t", (Column("a"), Column("n", "number")), [("x", k) for k in range(num)]).html()
    assert text.count("<td") == 2 * min(num, 20)
    assert ("more rows" in text) == (num > 20) and (num <= 20 or f"and {num - 20} more rows" in text)
    assert ("<table" in text) == (num > 0)
    assert "font-size:13px" not in Table("", (Column("a"),), []).html()


def test_cells_without_a_value():
    columns = (Column("b", "bytes"), Column("s", "share"), Column("n", "number"), Column("c", "code"), Column("t"))
    table = Table("t", columns, [(None, None, None, None, None), (0, 0.0, 1.5, "", "x")])
    assert [line.split() for line in table.lines()[1:]] == [["-"] * 5, ["0", "0.0%", "1.5", "-", "x"]]
    assert "0 bytes" in table.html() and "<code>-</code>" in table.html()
