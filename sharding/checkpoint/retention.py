"""Which checkpoints to keep: the newest, and the best."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Orbax's PreservationPolicy: which checkpoints to keep."""

    figures: dict[int, float]
    num_newest: int
    keep_best: bool

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        existing = sorted(info.step for info in checkpoints)
        kept: set[int | None] = set(existing[-self.num_newest :])
        if self.keep_best:
            kept.add(best({step: self.figures[step] for step in existing if step in self.figures}))
        return [info.step in kept for info in checkpoints]


def best(figures: Mapping[int, float]) -> int | None:
    """The newest step with the lowest figure; None if no step has a figure other than NaN, which is never the best."""
    measured = [step for step, figure in figures.items() if not math.isnan(figure)]
    return min(measured, key=lambda step: (figures[step], -step), default=None)
