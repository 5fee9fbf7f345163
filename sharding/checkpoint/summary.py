"""The content of a checkpoint, without reading its arrays or needing the devices they were saved from."""

from dataclasses import dataclass
from pathlib import Path

from .corruption import document, document_or_none
from .directory import EXTRA, FACTS, FIGURE, Directory, Json, existing_step, steps
from .retention import best


@dataclass(frozen=True, kw_only=True)
class ArrayFacts:
    """One array of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    spec: tuple[tuple[str, ...], ...] | None
    """Per dim the mesh axes it was sharded over when saved; None if the array was on no mesh."""
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Description:
    """One checkpoint: its arrays, the documents beside them, and its size."""

    step: int
    arrays: tuple[ArrayFacts, ...]
    extra: Json
    figure: float | None
    disk_bytes: int
    """Total size of its files; arrays are stored compressed."""

    @property
    def num_bytes(self) -> int:
        """Total size of the arrays in memory."""
        return sum(array.num_bytes for array in self.arrays)


def describe(directory: Directory, step: int | None = None) -> Description:
    """Describes the checkpoint of `step`, by default the newest."""
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


def extra(directory: Directory, step: int | None = None) -> Json:
    """The `extra` saved with the checkpoint of `step`, by default the newest."""
    return document(directory, existing_step(directory, step), EXTRA)["extra"]


def figures(directory: Directory) -> dict[int, float]:
    """The figure saved with each checkpoint that has one, by step. Corrupted checkpoints are skipped."""
    found: dict[int, float] = {}
    for step in steps(directory):
        kept = document_or_none(directory, step, EXTRA)
        if kept and kept.get(FIGURE) is not None:
            found[step] = kept[FIGURE]
    return found


def best_step(directory: Directory) -> int | None:
    """The step whose checkpoint has the lowest figure, or None if none has one other than NaN."""
    return best(figures(directory))


def _disk_bytes(directory: Directory, step: int) -> int:
    return sum(path.stat().st_size for path in Path(directory, str(step)).rglob("*") if path.is_file())
