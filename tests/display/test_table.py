"""Tables: as text, as safe HTML that fits a notebook, and as pandas frames."""

import re
import sys
from html.parser import HTMLParser

import pytest
from support import browser

from sharding import ShardingError
from sharding.display import Column, Table, Tabular

COLUMNS = (Column("op", "code"), Column("bytes", "bytes"), Column("time", "seconds"), Column("share", "share"))
ROWS = [("dot_general", 4096, 0.25, 0.5), ("<script>alert(1)</script>", 7, 1e-6, 0.001), ("", None, 2.0, 1.0)]
TABLE = Table("a title & more", COLUMNS, ROWS)


class Result(Tabular):
    def tables(self):
        return [TABLE, Table("sums", COLUMNS[:2], [("all", 4103)])]


class Cells(HTMLParser):
    """The texts of all cells, and the tags."""

    def __init__(self, text):
        super().__init__()
        self.cells, self.tags = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_data(self, data):
        if self.cells:
            self.cells[-1] += data


def test_text_is_aligned_with_exact_numbers():
    title, head, *rows = str(TABLE).splitlines()
    assert title == "a title & more" and head.split() == ["op", "bytes", "time", "share"]
    assert rows[0].split() == ["dot_general", "4,096", "250", "ms", "50.0%"]
    assert rows[2].split() == ["-", "-", "2", "s", "100.0%"]
    assert str(Table("nothing", COLUMNS, [])) == "nothing"


def test_html_has_every_cell_and_no_markup_of_its_data():
    found = Cells(TABLE.html())
    assert found.cells[:8] == ["op", "bytes", "time", "share", "dot_general", "4.1 kB", "250 ms", "50.0%"]
    assert found.cells[8] == "<script>alert(1)</script>" and "script" not in found.tags
    assert "a title &amp; more" in TABLE.html() and 'title="4,096 bytes"' in TABLE.html()
    assert re.findall("<code>(.*?)</code>", TABLE.html()) == [
        "dot_general",
        "&lt;script&gt;alert(1)&lt;/script&gt;",
        "-",
    ]


def test_long_tables_are_cut_in_notebooks():
    text = Table("", COLUMNS, ROWS * 10).html()
    assert text.count("<tr>") == 21 and "and 10 more rows" in text
    assert Table("", COLUMNS, ROWS[:1] * 20).html().count("<tr>") == 21
    assert "more rows" not in Table("", COLUMNS, ROWS[:1] * 20).html()
    assert "and 1 more rows" in Table("", COLUMNS, ROWS[:1] * 21).html()


def test_rows_are_plain_and_sums_come_first_in_notebooks():
    assert Result().rows() == ROWS
    html = Result()._repr_html_()
    assert html.index("sums") < html.index("a title")


def test_to_pandas():
    pandas = pytest.importorskip("pandas")
    frame = Result().to_pandas()
    assert isinstance(frame, pandas.DataFrame) and list(frame.columns) == ["op", "bytes", "time", "share"]
    assert frame["time"].sum() == pytest.approx(2.250001)


def test_without_pandas_the_error_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(
        ShardingError, match=r"(?s)Result.to_pandas\(\).*package pandas.*pip install pandas.*Result.rows"
    ):
        Result().to_pandas()


@pytest.mark.skipif(bool(browser.missing_programs()), reason=browser.missing_programs())
def test_a_wide_table_stays_within_the_notebook(tmp_path):
    words = "operand 1 of dot_general, float32[64, 64], resharded from [data, -] to [-, data] " * 3
    wide = Table("wide", (Column("cause"), Column("cure"), Column("bytes", "bytes")), [(words, words, 5)] * 3)
    unbroken = Table("unbroken", (Column("name", "code"),) * 4, [("x" * 120,) * 4])
    page = tmp_path / "page.html"
    page.write_text(f'<body style="width:700px;margin:0">{wide.html()}{unbroken.html()}', encoding="utf-8")
    with browser.chromium() as driver:
        browser.set_viewport(driver, 700, 600)
        driver.get(page.as_uri())
        sizes = "return [...document.querySelectorAll('body > div')].map((e) => [e.clientWidth, e.scrollWidth])"
        (width, needed), (outer, inner) = driver.execute_script(sizes)
        assert driver.execute_script("return document.documentElement.scrollWidth") == 700
    assert needed == width <= 700
    assert inner > outer  # scrolls by itself


def test_number_columns_are_aligned_to_the_right():
    cells = re.findall(r'<t[dh] style="([^"]*)">', TABLE.html())
    assert ["text-align:right" in style for style in cells[:4]] == [False, True, True, True]
