"""A folder of checkpoints as it lies on disk: which steps it has, their documents, and what to say of a damaged one.

Nothing here needs the arrays, nor the devices that they were saved from.
"""

import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from ..errors import ShardingError
from .quiet import silence_orbax

Directory = str | os.PathLike[str]

Json = Any
"""What the json module can write."""

# The parts of a checkpoint, and the keys of its last one.
ARRAYS, FACTS, EXTRA = "arrays", "facts", "extra"
FIGURE = "figure"
_DOCUMENT, _CHECKSUM = "document", "crc32"


def reader(directory: Directory) -> Any:
    """Orbax's manager of a folder, to read with."""
    import orbax.checkpoint as ocp

    silence_orbax()
    # Each process reads for itself: what only one of them asks for, or finds damaged, leaves no other waiting.
    number = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=number, active_processes={number}, barrier_sync_key_prefix=f"reader-{number}"
    )
    options = ocp.CheckpointManagerOptions(
        create=False, multiprocessing_options=alone, cleanup_tmp_directories=False, enable_background_delete=False
    )
    # Orbax refuses relative paths.
    return ocp.CheckpointManager(Path(directory).absolute(), options=options)


def steps(directory: Directory) -> list[int]:
    """The steps with a whole checkpoint in `directory`, oldest first."""
    try:
        if not Path(directory).is_dir():
            return []
        with reader(directory) as manager:
            return sorted(manager.all_steps())
    except OSError as error:
        raise ShardingError(
            f"look for checkpoints in {os.fspath(directory)!r}",
            there=first_line(error),
            must="the folder must be one to read",
        ) from None


def latest_step(directory: Directory) -> int | None:
    """The newest step with a whole checkpoint in `directory`, or None."""
    return max(steps(directory), default=None)


def figures(directory: Directory) -> dict[int, float]:
    """The figure that was given with each checkpoint that has one, by step. Damaged checkpoints are left out."""
    found: dict[int, float] = {}
    for step in steps(directory):
        document = document_or_none(directory, step, EXTRA)
        if document and document.get(FIGURE) is not None:
            found[step] = document[FIGURE]
    return found


def best_step(directory: Directory) -> int | None:
    """The step whose checkpoint has the lowest figure, or None where none has a figure."""
    found = figures(directory)
    return min(found, key=lambda step: (found[step], -step), default=None)


def extra(directory: Directory, step: int | None = None) -> Json:
    """What was given as `extra` when the checkpoint of `step`, by default the newest, was saved."""
    return document(directory, existing_step(directory, step), EXTRA)["extra"]


def existing_step(directory: Directory, step: int | None) -> int:
    """`step`, or the newest one for None. Raises an error that lists the steps if it is not there."""
    there = steps(directory)
    wanted = step if step is not None else max(there, default=None)
    if wanted in there and wanted is not None:
        return wanted
    asked = "newest checkpoint" if step is None else f"checkpoint of step {step}"
    raise ShardingError(
        f"read the {asked} in {os.fspath(directory)!r}",
        there="steps " + ", ".join(map(str, there)) if there else "no checkpoint",
        must="the checkpoint must be there",
        fix=f"step {there[-1]}" if there else "save one first",
    )


def sealed(document: Json) -> Json:
    """A document as it is written: with a checksum of its own."""
    return {_DOCUMENT: document, _CHECKSUM: _crc32(document)}


def _crc32(document: Json) -> int:
    return zlib.crc32(json.dumps(document, sort_keys=True).encode())


def document(directory: Directory, step: int, part: str) -> Json:
    """One of the JSON documents of a checkpoint that is there."""
    try:
        return _read(directory, step, part)
    except Exception as error:
        reason = f"{part}: {first_line(error)}"
    raise damaged(directory, step, reason, lambda older: document_or_none(directory, older, part) is not None)


def document_or_none(directory: Directory, step: int, part: str) -> Json:
    """One of the JSON documents of a checkpoint; None if it cannot be read."""
    try:
        return _read(directory, step, part)
    except Exception:
        return None


def _read(directory: Directory, step: int, part: str) -> Json:
    import orbax.checkpoint as ocp

    with reader(directory) as manager:
        found = manager.restore(step, args=ocp.args.Composite(**{part: ocp.args.JsonRestore()}))[part]
    if found[_CHECKSUM] != _crc32(found[_DOCUMENT]):
        raise ValueError("its checksum differs")
    return found[_DOCUMENT]


def damaged(directory: Directory, step: int, reason: str, is_good: Callable[[int], bool]) -> ShardingError:
    """The error of a checkpoint that is not whole, with the newest older step that is good."""
    older = [known for known in reversed(steps(directory)) if known < step]
    good = next((known for known in older if is_good(known)), None)
    none = "none of the older checkpoints is whole" if older else "there is no older checkpoint to go back to"
    return ShardingError(
        f"restore step {step} from {os.fspath(directory)!r}",
        there=reason,
        must="a checkpoint must be whole",
        fix=none if good is None else f"the checkpoint of step {good}, which is whole",
    )


def first_line(error: Exception) -> str:
    """What went wrong, in at most 200 characters."""
    text = (str(error).strip().splitlines() or [""])[0][:200]
    return text or type(error).__name__
