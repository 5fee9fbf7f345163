"""`Table`: rows of plain values with a title, as text, as HTML for notebooks and as a pandas frame."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Literal, NamedTuple

from ..errors import ShardingError
from .text_table import aligned
from .units import bytes_text, seconds_text

Row = tuple[Any, ...]
Unit = Literal["", "code", "bytes", "seconds", "number", "share"]
"""How a column is written: as text, as code, or as a number with its unit."""

MAX_ROWS = 20
"""Rows of a table in a notebook."""
_CELL = "padding:2px 12px 2px 0;vertical-align:top;border-bottom:1px solid #8883"
_NUMBER = "text-align:right;white-space:nowrap"
_NOTE = "font-size:12px;margin:2px 0;overflow-wrap:break-word"
_TEXT = "text-align:left;overflow-wrap:break-word"


class Column(NamedTuple):
    """A column of a table."""

    name: str
    unit: Unit = ""

    @property
    def is_number(self) -> bool:
        """Whether its cells are numbers."""
        return self.unit not in ("", "code")


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of plain values under one title."""

    title: str
    columns: tuple[Column, ...]
    rows: Sequence[Row]

    def __str__(self) -> str:
        return "\n".join([self.title, *(self.lines() if self.rows else [])])

    def lines(self) -> list[str]:
        """The lines of the head and the rows, aligned."""
        head = tuple(column.name for column in self.columns)
        cells = [tuple(map(_plain, self.columns, row)) for row in self.rows]
        right = [k for k, column in enumerate(self.columns) if column.is_number]
        return aligned([head, *cells], right=right)

    def html(self, max_rows: int = MAX_ROWS) -> str:
        """The table as HTML that fits a notebook: text wraps, and a table that is still too wide scrolls."""
        head = "".join(f'<th style="{_style(c)};font-weight:500">{escape(c.name)}</th>' for c in self.columns)
        body = "".join(f"<tr>{self._cells(row)}</tr>" for row in self.rows[:max_rows])
        left = len(self.rows) - max_rows
        more = f"<div>and {left:,} more rows: <code>.rows()</code></div>" if left > 0 else ""
        style = "border-collapse:collapse;font-size:12px;max-width:100%"
        table = f'<table style="{style}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        title = f'<div style="font-size:13px;margin:8px 0 4px">{escape(self.title)}</div>' if self.title else ""
        return f'<div style="overflow-x:auto;max-width:100%">{title}{table if self.rows else ""}{more}</div>'

    def _cells(self, row: Row) -> str:
        return "".join(f'<td style="{_style(c)}">{_html(c, x)}</td>' for c, x in zip(self.columns, row, strict=True))

    def to_pandas(self, asked: str) -> Any:
        """The rows as a `pandas.DataFrame`; numbers are bytes and seconds.

        Args:
            asked: the request, for the error.

        Raises:
            ShardingError: pandas is not installed.
        """
        try:
            import pandas  # pyright: ignore[reportMissingImports]  (optional)
        except ImportError:
            raise ShardingError(
                asked,
                found="the package pandas is not installed",
                required="pandas",
                fix=["pip install pandas", f"{asked.removesuffix('to_pandas()')}rows(), a list of plain tuples"],
            ) from None
        return pandas.DataFrame(list(self.rows), columns=[column.name for column in self.columns])


class Tabular:
    """A result with rows: `.rows()`, `.to_pandas()`, and a table in notebooks."""

    __slots__ = ()

    def tables(self) -> list[Table]:
        """Its tables: the one of its rows, then those of sums, which a notebook shows before it."""
        raise NotImplementedError

    def notes(self) -> list[str]:
        """Lines below the tables: what these leave out, and doubts."""
        return []

    def rows(self) -> list[Row]:
        """The rows as plain tuples; numbers are in bytes and seconds."""
        return list(self.tables()[0].rows)

    def to_pandas(self) -> Any:
        """The rows as a `pandas.DataFrame`.

        Raises:
            ShardingError: pandas is not installed.
        """
        return self.tables()[0].to_pandas(f"{type(self).__name__}.to_pandas()")

    def _repr_html_(self) -> str:
        first, *others = self.tables()
        notes = [f'<div style="{_NOTE}">{escape(note)}</div>' for note in self.notes()]
        return "".join([*(table.html() for table in (*others, first)), *notes])


def _style(column: Column) -> str:
    return f"{_CELL};{_NUMBER if column.is_number else _TEXT}"


def _plain(column: Column, cell: Any) -> str:
    if cell is None or cell == "":
        return "-"
    if column.unit == "share":
        return f"{cell:.1%}"
    if column.unit == "seconds":
        return seconds_text(cell)
    return f"{cell:,}" if column.is_number and isinstance(cell, int) else str(cell)


def _html(column: Column, cell: Any) -> str:
    if column.unit == "bytes" and cell is not None:
        return f'<span title="{cell:,} bytes">{bytes_text(cell)}</span>'
    text = escape(_plain(column, cell))
    return f"<code>{text}</code>" if column.unit == "code" else text
