"""What is in a checkpoint, told without reading its arrays and without the devices that they came from."""

from dataclasses import dataclass
from pathlib import Path

from .folder import EXTRA, FACTS, FIGURE, Directory, Json, document, existing_step


@dataclass(frozen=True, kw_only=True)
class ArrayFacts:
    """One array of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    spec: tuple[tuple[str, ...], ...] | None
    """Per dim the axes that split it when it was saved; None where the array was on no mesh."""
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Description:
    """One checkpoint: its arrays, what was kept beside them, and its size."""

    step: int
    arrays: tuple[ArrayFacts, ...]
    extra: Json
    figure: float | None
    disk_bytes: int
    """Of all its files: arrays are stored compressed."""

    @property
    def num_bytes(self) -> int:
        """Of all arrays together, in memory."""
        return sum(array.num_bytes for array in self.arrays)


def describe(directory: Directory, step: int | None = None) -> Description:
    """What the checkpoint of `step`, by default the newest, holds."""
    step = existing_step(directory, step)
    facts, kept = document(directory, step, FACTS), document(directory, step, EXTRA)
    arrays = tuple(
        ArrayFacts(
            name=name,
            shape=tuple(fact["shape"]),
            dtype=fact["dtype"],
            spec=None if fact["spec"] is None else tuple(map(tuple, fact["spec"])),
            num_bytes=fact["bytes"],
        )
        for name, fact in facts.items()
    )
    return Description(
        step=step, arrays=arrays, extra=kept["extra"], figure=kept[FIGURE], disk_bytes=_disk_bytes(directory, step)
    )


def _disk_bytes(directory: Directory, step: int) -> int:
    return sum(path.stat().st_size for path in Path(directory, str(step)).rglob("*") if path.is_file())
