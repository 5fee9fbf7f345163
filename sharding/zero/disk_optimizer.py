"""An optimizer with its parameters and state on disk (ZeRO-Infinity): tiles in, an update, tiles out."""

from __future__ import annotations

import difflib
import itertools
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .. import compat, paths
from ..errors import ShardingError
from ..graph.straight_line import trace_program, variables
from ..mesh import current
from ..rules.rule_table import ELEMENTWISE
from .state_files import Entry, Part, StateFiles, tile_rows
from .state_specs import with_axis

T = TypeVar("T")


class DiskOptimizer:
    """An optax optimizer whose parameters and state are in the files of one directory.

    Runs outside `jit`: Python reads tiles ahead, updates them on the devices and writes them behind. Two generations of
    every file and a record that is replaced at the end of a step make each step happen whole or not at all, whenever
    the process is killed. Made again for the same directory it continues at the last step.

    Example:
        >>> import tempfile
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from sharding import zero
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     on_disk = zero.DiskOptimizer(optax.sgd(0.5), directory)
        ...     on_disk.init({"w": jnp.ones(4)})
        ...     on_disk.update({"w": jnp.arange(4.0)})
        ...     on_disk.step, on_disk.read("w").tolist()
        (1, [1.0, 0.5, 0.0, -0.5])
    """

    def __init__(
        self,
        tx: optax.GradientTransformation,
        directory: str | os.PathLike[str],
        *,
        tile_bytes: int = 2**26,
        window: int = 2,
        axis: str = "data",
    ):
        """Opens the state in a directory, if it has one.

        Args:
            tx: an elementwise optimizer: AdamW, SGD, Lion... It sees one parameter at a time, without its name.
            directory: holds the files, of twice the bytes of parameters and state.
            tile_bytes: of a parameter that are updated at a time; at least one row.
            window: tiles that are read ahead, and that may wait to be written.
            axis: mesh axis that shards what is read, where a mesh is in context and the axis divides it.

        Raises:
            ShardingError: several processes; an optimizer that is not elementwise; a corrupted record; a state that
                another optimizer has written.
        """
        asked = f"zero.DiskOptimizer({str(directory)!r})"
        if jax.process_count() > 1:
            raise ShardingError(asked, found=f"{jax.process_count()} processes", required="a single process")
        if tile_bytes < 1 or window < 1:
            raise ShardingError(asked, found=f"tile_bytes={tile_bytes}, window={window}", required="at least 1")
        _check_elementwise(asked, tx)
        self.tx, self.tile_bytes, self.window, self.axis = tx, tile_bytes, window, axis
        self.files = StateFiles(directory)
        self._check_state(asked)
        self._written: deque[Future[None]] = deque()
        self._update = jax.jit(self._updated)

    @property
    def step(self) -> int | None:
        """Steps taken; None before `init`."""
        return self.files.step

    @property
    def names(self) -> list[str]:
        """The names of the parameters, paths in the tree that `init` got."""
        return [*self.files.entries]

    def init(self, params: Any) -> None:
        """Writes parameters and their initial optimizer state.

        Args:
            params: a pytree of arrays, or of functions that return one, which are called one at a time.

        Raises:
            ShardingError: the directory has a state already, or the disk is full.
        """
        if self.step is not None:
            raise ShardingError(
                f"zero.DiskOptimizer.init in {str(self.files.directory)!r}",
                found=f"the state of step {self.step}",
                required="a directory without a state",
                fix=["continue without init", "another directory"],
            )
        self.files = StateFiles(self.files.directory)
        with ThreadPoolExecutor(1) as thread:
            for path, leaf in jax.tree_util.tree_leaves_with_path(params):
                name, array = paths.text(path), np.asarray(leaf() if callable(leaf) else leaf)
                self.files.add(name, self._entry(array))
                for tile, rows in enumerate(self.files.entries[name].rows):
                    part = _rows(array, rows)
                    self._write(thread, name, tile, [part, *jax.tree.leaves(self.tx.init(part))])
            self._drain()
        self.files.commit()

    def read(self, name: str) -> np.ndarray:
        """A parameter.

        Raises:
            ShardingError: no such parameter, or a corrupted file.
        """
        if name not in self.files.entries:
            raise ShardingError(
                f"read {name!r} from {str(self.files.directory)!r}",
                found=f"parameters {', '.join(self.names[:8]) or 'none'}{', ...' if len(self.names) > 8 else ''}",
                required="one of .names",
                fix=difflib.get_close_matches(name, self.names, n=1),
            )
        entry = self.files.entries[name]
        tiles = [self.files.read(name, k, slice(1))[0] for k in range(len(entry.tiles))]
        return np.concatenate(tiles).reshape(entry.shape) if entry.shape else tiles[0]

    def update(self, gradients: Any) -> None:
        """Takes a step: updates every parameter by its gradient, a pytree as `init` got.

        Raises:
            ShardingError: other names or shapes than on disk, a full disk, or a corrupted file; the state stays as it
                was before the step.
        """
        found = {paths.text(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(gradients)}
        with self.taking_step() as apply:
            apply(found)

    def taking_step(self) -> TakenStep:
        """A context in which gradients are applied, a few at a time, each once; at its end the step is committed."""
        return TakenStep(self)

    def placed(self, array: np.ndarray) -> jax.Array:
        """An array on the devices, sharded over the axis where a mesh is in context and the axis divides it."""
        mesh = current()
        if not isinstance(mesh, Mesh):
            return jnp.asarray(array)
        sizes = dict(mesh.shape)
        spec = with_axis(array.shape, P(), self.axis, sizes) if self.axis in sizes else None
        return jax.device_put(array, NamedSharding(mesh, spec or P()))

    def apply(self, gradients: dict[str, Any], reader: ThreadPoolExecutor, writer: ThreadPoolExecutor) -> None:
        """Updates the parameters that these are the gradients of, in the generation that the step writes."""
        self._check(gradients)
        tiles = [(name, k) for name in gradients for k in range(len(self.files.entries[name].tiles))]
        read = (lambda name=name, k=k: self.files.read(name, k) for name, k in tiles)
        for (name, k), arrays in zip(tiles, ahead(read, self.window, reader), strict=True):
            gradient = _rows(jnp.asarray(gradients[name]), self.files.entries[name].rows[k])
            new = self._update(gradient, *map(self.placed, arrays))
            self._write(writer, name, k, new)

    def _updated(self, gradient: jax.Array, param: jax.Array, *leaves: jax.Array) -> list[Any]:
        state = jax.tree.unflatten(jax.tree.structure(jax.eval_shape(self.tx.init, param)), leaves)
        updates, state = self.tx.update(gradient.astype(param.dtype), state, param)
        return [optax.apply_updates(param, updates), *jax.tree.leaves(state)]

    def _entry(self, array: np.ndarray) -> Entry:
        num_rows = array.shape[0] if array.ndim else 1
        row_bytes = array.itemsize * math.prod(array.shape[1:])
        tiles = []
        for rows in tile_rows(num_rows, row_bytes, self.tile_bytes):
            tiles.append(self._parts(((rows, *array.shape[1:]) if array.ndim else (), str(array.dtype))))
        return Entry(shape=array.shape, tiles=tuple(tiles), state=self._state(tiles[0][0]))

    def _parts(self, param: Part) -> tuple[Part, ...]:
        """A tile of a parameter, and of what the optimizer keeps of it."""
        part = jax.ShapeDtypeStruct(*param)
        return tuple(map(_part, (part, *jax.tree.leaves(jax.eval_shape(self.tx.init, part)))))

    def _state(self, param: Part) -> str:
        """The structure of what the optimizer keeps of a parameter."""
        return _structure(jax.tree.structure(jax.eval_shape(self.tx.init, jax.ShapeDtypeStruct(*param))))

    def _check_state(self, asked: str) -> None:
        """Raises for files that another optimizer has written."""
        for name, entry in self.files.entries.items():
            param = entry.tiles[0][0]
            found, required = (entry.state, entry.tiles[0]), (self._state(param), self._parts(param))
            if found != required:
                found, required = (
                    f"for {name}: {state} of {', '.join(f'{dtype}{list(shape)}' for shape, dtype in own) or 'nothing'}"
                    for state, (_, *own) in (found, required)
                )
                fix = ["the optimizer that it was made with, also with other hyperparameters", "another directory"]
                raise ShardingError(asked, found=f"a state {found}", required=f"the optimizer's, {required}", fix=fix)

    def _check(self, gradients: dict[str, Any]) -> None:
        entries = self.files.entries
        wrong = [f"{name}: no such parameter" for name in gradients if name not in entries]
        wrong += [
            f"{name}: gradient {list(jnp.shape(g))}, parameter {list(entries[name].shape)}"
            for name, g in gradients.items()
            if name in entries and jnp.shape(g) != entries[name].shape
        ]
        if wrong:
            raise ShardingError(
                f"update the state in {str(self.files.directory)!r}", found=wrong, required="a gradient per parameter"
            )

    def _write(self, thread: ThreadPoolExecutor, name: str, tile: int, arrays: Sequence[Any]) -> None:
        """Writes a tile behind; waits while as many wait as the window has."""
        while len(self._written) >= self.window:
            self._written.popleft().result()
        self._written.append(thread.submit(lambda: self.files.write(name, tile, [np.asarray(x) for x in arrays])))

    def _drain(self) -> None:
        while self._written:
            self._written.popleft().result()


class TakenStep:
    """One step of a `DiskOptimizer`: takes gradients by name, and commits when the context ends without an error."""

    def __init__(self, optimizer: DiskOptimizer):
        self.optimizer = optimizer

    def __enter__(self) -> Callable[[dict[str, Any]], None]:
        self.reader, self.writer = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self.optimizer.files.discard()
        return lambda gradients: self.optimizer.apply(gradients, self.reader, self.writer)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            if error is None:
                self.optimizer._drain()
                self.optimizer.files.commit()
        finally:
            self.reader.shutdown(cancel_futures=True)
            self.writer.shutdown(cancel_futures=True)
            self.optimizer._written.clear()


def ahead(reads: Iterable[Callable[[], T]], window: int, thread: ThreadPoolExecutor) -> Iterator[T]:
    """What the functions return, in order, of which `window` run ahead in a thread."""
    reads = iter(reads)
    waiting = deque(thread.submit(read) for read in itertools.islice(reads, window + 1))
    while waiting:
        found = waiting.popleft().result()
        waiting.extend(thread.submit(read) for read in itertools.islice(reads, 1))
        yield found


def _rows(array: Any, rows: tuple[int, int]) -> Any:
    return array[slice(*rows)] if array.ndim else array


def _structure(tree: Any) -> str:
    """A tree by the names of its types, as `tuple(TraceState(*), EmptyState())`, which no version of JAX changes."""
    node = tree.node_data()
    if node is None:
        return "*"
    kind, keys = node
    parts = [*map(_structure, tree.children())]
    if issubclass(kind, dict):
        parts = [f"{key}: {part}" for key, part in zip(keys, parts, strict=True)]
    return f"{kind.__name__}({', '.join(parts)})"


def _part(leaf: Any) -> Part:
    return tuple(leaf.shape), str(leaf.dtype)


def _check_elementwise(asked: str, tx: optax.GradientTransformation) -> None:
    """Raises for an optimizer whose update of an element depends on others: a tile does not have them."""
    x = jax.ShapeDtypeStruct((3, 5), jnp.float32)
    state, tree = jax.tree.flatten(jax.eval_shape(tx.init, x))

    def update(gradient: Any, param: Any, *leaves: Any) -> list[Any]:
        return jax.tree.leaves(tx.update(gradient, jax.tree.unflatten(tree, leaves), param))

    program = trace_program(update, x, x, *state)
    mixing = dict.fromkeys(
        " at ".join(filter(None, (eqn.primitive.name, compat.source_line(eqn))))
        for eqn in program.eqns
        if eqn.primitive.name not in ELEMENTWISE and any(v.aval.size > 1 for v in variables(eqn.invars))
    )
    shapes = {v.aval.shape for v in program.inputs} - {(), (3, 5)}
    if mixing or shapes:
        raise ShardingError(
            asked,
            found=[*mixing] or [f"state of shape {list(shape)} for a parameter of shape [3, 5]" for shape in shapes],
            required="an optimizer that updates every element by itself, as tiles are updated one after the other",
            fix=["without a norm or a factored moment", 'zero.shard(tx, offload="host")'],
        )
