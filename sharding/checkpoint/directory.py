"""A directory of checkpoints on disk: the steps in it, and access to their parts through Orbax."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from ..errors import ShardingError
from .orbax_logging import orbax_silenced

Directory = str | os.PathLike[str]

Json = Any
"""A JSON-serializable value."""

# The parts of a checkpoint, and the keys of the last one.
ARRAYS, FACTS, EXTRA = "arrays", "facts", "extra"
FIGURE = "figure"


@contextlib.contextmanager
def reader(directory: Directory) -> Iterator[Any]:
    """An Orbax manager for reading from a directory."""
    import orbax.checkpoint as ocp

    # Each process reads on its own: what only one of them requests, or finds corrupted, must not block the others.
    number = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=number, active_processes={number}, barrier_sync_key_prefix=f"reader-{number}"
    )
    options = ocp.CheckpointManagerOptions(
        create=False, multiprocessing_options=alone, cleanup_tmp_directories=False, enable_background_delete=False
    )
    path = Path(directory).absolute()  # Orbax rejects relative ones
    with orbax_silenced(), ocp.CheckpointManager(path, options=options) as manager:
        yield manager


def steps(directory: Directory) -> list[int]:
    """The steps with a complete checkpoint in `directory`, oldest first."""
    try:
        if not Path(directory).is_dir():
            return []
        with reader(directory) as manager:
            return sorted(manager.all_steps())
    except OSError as error:
        raise ShardingError(
            f"list checkpoints in {os.fspath(directory)!r}",
            found=first_line(error),
            required="a readable directory",
        ) from None


def latest_step(directory: Directory) -> int | None:
    """The newest step with a complete checkpoint in `directory`, or None."""
    return max(steps(directory), default=None)


def existing_step(directory: Directory, step: int | None) -> int:
    """`step`, or the newest one for None. If it does not exist, raises an error that lists the steps."""
    existing = steps(directory)
    chosen = step if step is not None else max(existing, default=None)
    if chosen in existing and chosen is not None:
        return chosen
    asked = "newest checkpoint" if step is None else f"checkpoint of step {step}"
    raise ShardingError(
        f"read the {asked} in {os.fspath(directory)!r}",
        found="steps " + ", ".join(map(str, existing)) if existing else "no checkpoint",
        required="an existing checkpoint",
        fix=f"step {existing[-1]}" if existing else "save one first",
    )


def read_json(directory: Directory, step: int, part: str) -> Json:
    """A JSON part of a checkpoint, as stored. Raises whatever Orbax raises."""
    import orbax.checkpoint as ocp

    with reader(directory) as manager:
        return manager.restore(step, args=ocp.args.Composite(**{part: ocp.args.JsonRestore()}))[part]


def first_line(error: Exception) -> str:
    """The first line of an error message, at most 200 characters."""
    text = (str(error).strip().splitlines() or [""])[0][:200]
    return text or type(error).__name__
