"""Tables as aligned text."""

from __future__ import annotations

from collections.abc import Collection, Sequence

MAX_RULE = 120
"""Maximal length of the rule under the header."""


def aligned(rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> list[str]:
    """One line per row, with two spaces between columns and no trailing spaces.

    Args:
        rows: cells, the same number in each row.
        right: indices of the right-aligned columns; the others are left-aligned.
    """
    return [line.rstrip() for line in _padded(rows, right)]


def ruled(rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> list[str]:
    """As `aligned`, with a rule under the first row."""
    head, *rest = _padded(rows, right)
    return [head.rstrip(), "-" * min(len(head), MAX_RULE), *(line.rstrip() for line in rest)]


def _padded(rows: Sequence[Sequence[str]], right: Collection[int]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [str.rjust if k in right else str.ljust for k in range(len(widths))]
    return ["  ".join(side(cell, w) for side, cell, w in zip(sides, row, widths, strict=True)) for row in rows]
