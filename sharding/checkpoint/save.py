"""Writing checkpoints in the background, and choosing which of them stay."""

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax

from ..errors import ShardingError
from .checksums import checksums
from .folder import FIGURE, Directory, Json, figures, first_line, sealed, steps
from .names import Tree, is_key, named_leaves, stored
from .quiet import silence_orbax

# A checkpoint that has had its day is first moved in here: a listed one never misses a file, whenever a kill comes.
_REMOVED = ".removed"


class Saver:
    """Writes the checkpoints of one run into one folder, one after the other.

    Of the checkpoints in the folder the newest `keep` stay, and with `keep_best` the one of the lowest figure too. A
    context manager: on the way out it waits for what is still being written.
    """

    def __init__(self, directory: Directory, *, keep: int = 3, keep_best: bool = True):
        if keep < 1:
            raise ShardingError(f"keep={keep} checkpoints", must="at least the newest one stays", fix="keep=1")
        import orbax.checkpoint as ocp

        silence_orbax()
        self.directory = Path(directory).absolute()
        self._figures = figures(directory)
        policy = _Keep(figures=self._figures, num_newest=keep, keep_best=keep_best)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policy,
            todelete_subdir=_REMOVED,
            cleanup_tmp_directories=True,
            # In the background a folder that cannot be made leaves threads that wait for it five minutes long
            # (Orbax 0.12.8), also when the process ends.
            async_options=ocp.options.AsyncOptions(create_directories_asynchronously=False),
        )
        with _writing(self.directory, "open"):
            self._manager = ocp.CheckpointManager(self.directory, options=options)
        self._writing_step: int | None = None
        self._clear()

    def save(self, step: int, state: Tree, extra: Json = None, *, figure: float | None = None) -> None:
        """Begin to save `state` and `extra` as the checkpoint of `step`.

        Comes back once the arrays are copied from the devices; the rest goes on in the background, and the state may be
        donated at once. A save that is still under way is waited for first. A step that is there already is left as
        it is.

        Args:
            step: the number of the checkpoint.
            state: a pytree of arrays; typed random keys are arrays too.
            extra: what the json module can write.
            figure: how good the state is, lower is better; without one it is never the best.

        Raises:
            ShardingError: a leaf of `state` is no array, or this or the save before could not be written.
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
            arrays=ocp.args.StandardSave(bits),
            facts=ocp.args.JsonSave(sealed({name: _facts(array, sums[name]) for name, array in arrays.items()})),
            extra=ocp.args.JsonSave(sealed({"extra": extra, FIGURE: figure})),
        )
        if figure is not None:
            self._figures[step] = figure
        with _writing(self.directory, step):
            self._manager.save(step, args=items, force=True)
        self._writing_step = step

    def wait(self) -> None:
        """Wait until what was saved is whole on disk. Raises what went wrong while it was written."""
        step, self._writing_step = self._writing_step, None
        if step is None:
            return
        with _writing(self.directory, step):
            self._manager.wait_until_finished()
        self._clear()

    def close(self) -> None:
        """Wait, and let go of the folder."""
        try:
            self.wait()
        finally:
            # What it has to say was said by `wait`.
            with contextlib.suppress(Exception):
                self._manager.close()

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
    """A checkpoint on its way to disk; it counts once `wait` came back."""

    step: int
    saver: Saver

    def wait(self) -> None:
        """Wait until the checkpoint is whole on disk. Raises what went wrong while it was written."""
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
    """Begin to save one checkpoint; the arguments are those of `Saver` and `Saver.save`."""
    saver = Saver(directory, keep=keep, keep_best=keep_best)
    saver.save(step, state, extra, figure=figure)
    return Saving(step=step, saver=saver)


@dataclass(frozen=True, kw_only=True)
class _Keep:
    """Which checkpoints Orbax preserves: its PreservationPolicy."""

    figures: dict[int, float]
    num_newest: int
    keep_best: bool

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        there = sorted(info.step for info in checkpoints)
        kept = set(there[-self.num_newest :])
        measured = [step for step in there if step in self.figures]
        if self.keep_best and measured:
            kept.add(min(measured, key=lambda step: (self.figures[step], -step)))
        return [info.step in kept for info in checkpoints]


def _facts(array: jax.Array, checksum: int) -> dict[str, Json]:
    """What is written beside an array."""
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
    """The axes that split one dim, of an entry of a PartitionSpec."""
    if entry is None:
        return []
    return [str(axis) for axis in entry] if isinstance(entry, tuple) else [str(entry)]


def _check_arrays(directory: Path, step: int, leaves: dict[str, Any]) -> None:
    others = [f"{name}: {type(leaf).__name__}" for name, leaf in leaves.items() if not isinstance(leaf, jax.Array)]
    if others:
        raise ShardingError(
            f"save step {step} to {str(directory)!r}",
            there=others,
            must="every leaf of the state must be a jax.Array",
            fix="jax.numpy.asarray, or the JSON document `extra`",
        )


@contextlib.contextmanager
def _writing(directory: Path, step: int | str) -> Iterator[None]:
    """Whatever goes wrong with the folder inside is an error that says what is still good."""
    try:
        yield
    except (ShardingError, jax.errors.JaxRuntimeError):  # of the latter kind: another process is gone
        raise
    except Exception as error:
        reason = first_line(error)
    else:
        return
    asked = f"save step {step} to {str(directory)!r}" if isinstance(step, int) else f"{step} {os.fspath(directory)!r}"
    try:
        good = steps(directory)
    except ShardingError:
        good = []
    raise ShardingError(
        asked,
        there=[
            reason,
            f"saved before and whole: steps {', '.join(map(str, good))}" if good else "nothing saved before",
        ],
        must="the folder must be one to write in, with room for a checkpoint",
        fix="make room, or another folder",
    )
