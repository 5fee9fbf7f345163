"""Ratios of times: median, quartiles and the worst."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Ratios of our time to another; below 1, ours is less."""

    median: float
    low: float | None
    """First quartile."""
    high: float | None
    """Third quartile."""
    worst: float | None
    """The largest ratio."""

    @classmethod
    def of_pairs(cls, ours: Sequence[float], others: Sequence[float]) -> Ratio:
        """The ratios within consecutive runs, which a busy machine slows down equally."""
        return cls._of(np.divide(ours, others))

    @classmethod
    def of_all(cls, ours: Sequence[float], others: Sequence[float]) -> Ratio:
        """The ratios of each of our runs to each of the others, where runs have no partner."""
        return cls._of(np.divide.outer(np.asarray(ours), np.asarray(others)))

    @classmethod
    def _of(cls, ratios: Any) -> Ratio:
        low, median, high, worst = (float(f"{x:.4g}") for x in np.quantile(ratios, (0.25, 0.5, 0.75, 1)))
        return cls(median=median, low=low, high=high, worst=worst)

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Ratio:
        """The ratio of a row of a result file."""
        return cls(**{name: row[name] for name in cls.__dataclass_fields__})

    def as_row(self) -> dict[str, float | None]:
        """The fields of a row."""
        return asdict(self)

    def __str__(self) -> str:
        """`0.99 (0.95-1.02, worst 1.10)`, without what was not recorded."""
        quartiles = [] if self.low is None else [f"{self.low:.2f}-{self.high:.2f}"]
        spread = quartiles + ([] if self.worst is None else [f"worst {self.worst:.2f}"])
        return f"{self.median:.2f}" + f" ({', '.join(spread)})" * bool(spread)


def unknown(ratios: Iterable[Ratio]) -> str:
    """`; quartiles and worst unknown`, where ratios lack them."""
    ratios = list(ratios)
    missing = ["quartiles"] * any(r.low is None for r in ratios) + ["worst"] * any(r.worst is None for r in ratios)
    return f"; {' and '.join(missing)} unknown" if missing else ""


def rounded(seconds: float) -> float:
    """Four significant digits."""
    return float(f"{seconds:.4g}")
