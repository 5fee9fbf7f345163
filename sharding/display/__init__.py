"""How results are shown: tables as text, HTML and pandas frames, drawings of sharded arrays, units, colours of axes.

In: plain rows, or shapes and specs. Out: text and HTML for terminals and notebooks.

Example:
    >>> from sharding.display import Column, Table
    >>> print(Table("sent", (Column("kind"), Column("bytes", "bytes")), [("all-reduce", 4096)]))
    sent
    kind        bytes
    all-reduce  4,096
"""

from .array_drawing import ArrayPicture, Drawing
from .table import Column, Row, Table, Tabular

__all__ = ["ArrayPicture", "Column", "Drawing", "Row", "Table", "Tabular"]
