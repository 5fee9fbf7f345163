"""Which checkpoints to keep: the newest, and the best."""

from collections.abc import Sequence
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
        kept = set(existing[-self.num_newest :])
        measured = [step for step in existing if step in self.figures]
        if self.keep_best and measured:
            kept.add(min(measured, key=lambda step: (self.figures[step], -step)))
        return [info.step in kept for info in checkpoints]
