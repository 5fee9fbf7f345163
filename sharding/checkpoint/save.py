"""Saving checkpoints asynchronously, and choosing which ones to keep."""

import contextlib
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax

from ..errors import ShardingError
from .array_names import Tree, is_key, named_leaves, stored
from .corruption import checksums, with_checksum
from .directory import ARRAYS, EXTRA, FACTS, FIGURE, Directory, Json, first_line, steps
from .orbax_logging import orbax_silenced
from .retention import Retention
from .summary import figures

# Checkpoints to delete are moved here first: a listed one is never missing a file, whenever the process is killed.
_REMOVED = ".removed"


class Saver:
    """Saves the checkpoints of one run to one directory, one at a time.

    Keeps the newest `keep` checkpoints, and with `keep_best` also the one with the lowest figure. A context manager: on
    exit it waits for the save in progress.

    Of host memory a save takes at most the bytes of the largest array beside arrays that are there already (those of
    CPU devices), and nothing once it is complete. From accelerators Orbax first copies the process's shards to the
    host. `restore` takes the process's shards, and up to three of the largest arrays while it reads.
    """

    def __init__(self, directory: Directory, *, keep: int = 3, keep_best: bool = True):
        if keep < 1:
            raise ShardingError(f"keep={keep} checkpoints", required="keep >= 1", fix="keep=1")
        import orbax.checkpoint as ocp

        self.directory = Path(directory).absolute()
        self._figures = figures(directory)
        policy = Retention(figures=self._figures, num_newest=keep, keep_best=keep_best)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policy,
            todelete_subdir=_REMOVED,
            cleanup_tmp_directories=True,
            # If it fails to create a directory in the background, its threads wait for it for five minutes
            # (Orbax 0.12.8), even at process exit.
            async_options=ocp.options.AsyncOptions(
                create_directories_asynchronously=False, barrier_sync_fn=self._barrier
            ),
        )
        self._thread = threading.get_ident()
        self._silenced = contextlib.ExitStack()
        self._silenced.enter_context(orbax_silenced())
        with _writing(self.directory, "open"):
            self._manager = ocp.CheckpointManager(self.directory, options=options, handler_registry=_handlers())
        self._writing_step: int | None = None
        self._clear()

    def save(self, step: int, state: Tree, extra: Json = None, *, figure: float | None = None) -> None:
        """Starts saving `state` and `extra` as the checkpoint of `step`.

        Waits for the save in progress, if any. Returns once the arrays are copied from the devices, after which the
        state may be donated; writing continues in the background. An existing step is left unchanged.

        Args:
            step: the step of the checkpoint.
            state: a pytree of arrays; typed random keys are allowed.
            extra: a JSON-serializable value.
            figure: a quality of the state, lower is better; a checkpoint without one, or with NaN, is never the best.

        Raises:
            ShardingError: a leaf of `state` is not an array, or this or the previous save failed.
        """
        import orbax.checkpoint as ocp

        self.wait()
        if step in self._manager.all_steps():
            return
        arrays = named_leaves(state)
        _check_arrays(self.directory, step, arrays)
        bits = {name: stored(array) for name, array in arrays.items()}
        sums = checksums(bits)
        items = ocp.args.Composite(
            arrays=ocp.args.PyTreeSave(bits),
            facts=ocp.args.JsonSave(with_checksum({name: _facts(array, sums[name]) for name, array in arrays.items()})),
            extra=ocp.args.JsonSave(with_checksum({"extra": extra, FIGURE: figure})),
        )
        if figure is not None:
            self._figures[step] = figure
        with _writing(self.directory, step):
            self._manager.save(step, args=items, force=True)
        self._writing_step = step

    def wait(self) -> None:
        """Waits until the last save is complete on disk. Raises if it failed."""
        step, self._writing_step = self._writing_step, None
        if step is None:
            return
        with _writing(self.directory, step):
            self._manager.wait_until_finished()
        self._clear()

    def close(self) -> None:
        """Waits for the save in progress and closes the Orbax manager."""
        try:
            self.wait()
        finally:
            # Errors of the save were raised by `wait`.
            with contextlib.suppress(Exception):
                self._manager.close()
        self._silenced.close()

    def _barrier(self, *, key: str, timeout_ms: int) -> None:
        """Waits for all processes, unless the save failed in this one.

        Orbax 0.12.8 waits for them before it raises the error, in a `finally` of a thread of its own, while the others
        are at another barrier.
        """
        import orbax.checkpoint as ocp

        if threading.get_ident() == self._thread or sys.exception() is None:
            ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)

    def _clear(self) -> None:
        if jax.process_index() == 0:
            shutil.rmtree(self.directory / _REMOVED, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, kw_only=True)
class Saving:
    """A checkpoint being saved; it is durable once `wait` returns."""

    step: int
    saver: Saver

    def wait(self) -> None:
        """Waits until the checkpoint is complete on disk. Raises if the save failed."""
        self.saver.close()


def save(
    directory: Directory,
    step: int,
    state: Tree,
    extra: Json = None,
    *,
    keep: int = 3,
    figure: float | None = None,
    keep_best: bool = True,
) -> Saving:
    """Starts saving one checkpoint; the arguments are those of `Saver` and `Saver.save`."""
    saver = Saver(directory, keep=keep, keep_best=keep_best)
    saver.save(step, state, extra, figure=figure)
    return Saving(step=step, saver=saver)


def _handlers() -> Any:
    """Orbax's handlers of the parts of a checkpoint.

    Arrays of CPU devices are in the host's memory already: where they are replicated, one process writes the shard of
    one device. By default, each device would write a part of its own, for which Orbax copies all arrays.
    """
    import orbax.checkpoint as ocp

    handler = ocp.type_handlers.ArrayHandler(use_replica_parallel=False if jax.default_backend() == "cpu" else None)
    arrays = ocp.PyTreeCheckpointHandler(
        type_handler_registry=ocp.type_handlers.create_type_handler_registry((jax.Array, handler))
    )
    found = ocp.handlers.DefaultCheckpointHandlerRegistry()
    found.add(ARRAYS, ocp.args.PyTreeSave, arrays)
    for part in (FACTS, EXTRA):
        found.add(part, ocp.args.JsonSave, ocp.JsonCheckpointHandler())
    return found


def _facts(array: jax.Array, checksum: int) -> dict[str, Json]:
    """The facts stored beside an array."""
    spec = getattr(array.sharding, "spec", None)
    return {
        "shape": list(array.shape),
        "dtype": str(array.dtype),
        "spec": None if spec is None else [_axes(entry) for entry in spec],
        "bytes": int(stored(array).nbytes),
        "impl": str(jax.random.key_impl(array)) if is_key(array) else None,
        "checksum": checksum,
    }


def _axes(entry: Any) -> list[str]:
    """The mesh axes in one entry of a PartitionSpec."""
    if entry is None:
        return []
    return [str(axis) for axis in entry] if isinstance(entry, tuple) else [str(entry)]


def _check_arrays(directory: Path, step: int, leaves: dict[str, Any]) -> None:
    others = [f"{name}: {type(leaf).__name__}" for name, leaf in leaves.items() if not isinstance(leaf, jax.Array)]
    if others:
        raise ShardingError(
            f"save step {step} to {str(directory)!r}",
            found=others,
            required="jax.Array leaves",
            fix="jax.numpy.asarray, or pass it in `extra`",
        )


@contextlib.contextmanager
def _writing(directory: Path, step: int | str) -> Iterator[None]:
    """Turns failures to write into an error that lists the complete checkpoints."""
    try:
        yield
    except (ShardingError, jax.errors.JaxRuntimeError):  # JaxRuntimeError: another process died
        raise
    except Exception as error:
        reason = first_line(error)
    else:
        return
    asked = f"save step {step} to {str(directory)!r}" if isinstance(step, int) else f"{step} {os.fspath(directory)!r}"
    try:
        complete = steps(directory)
    except ShardingError:
        complete = []
    raise ShardingError(
        asked,
        found=[
            reason,
            f"complete checkpoints: steps {', '.join(map(str, complete))}" if complete else "no earlier checkpoint",
        ],
        required="a writable directory with space for a checkpoint",
        fix="free space, or another directory",
    )
