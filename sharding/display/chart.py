"""`Chart`: a drawing as SVG, displayed by Jupyter and saved to a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Chart:
    """An SVG drawing, displayed by Jupyter."""

    svg: str

    def __str__(self) -> str:
        return self.svg

    def _repr_svg_(self) -> str:
        return self.svg

    def save(self, path: str | Path) -> None:
        """Writes the SVG file."""
        Path(path).write_text(self.svg, encoding="utf-8")
