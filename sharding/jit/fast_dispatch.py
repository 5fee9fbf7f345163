"""The fast path of dispatch: executables of previous calls, without computing a cache key.

A program on a few hundred small arrays is dispatched in less than a millisecond, so every Python operation per array
counts. The fast path checks only that all leaves are committed arrays, or are transferred; `jax.jit` compares shapes,
dtypes and shardings anyway. Of several executables for one argument tree it takes the one that agrees in the few leaves
in which they differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from .. import compat
from ..mesh import current
from .arguments import Arguments, Layout
from .cache_key import LeafKey, context_key, leaf_key
from .current_mesh import AnyMesh
from .executable import ArgumentMismatch, Executable
from .placed_arguments import needs_transfer
from .signature import Signature

MAX_CALLS, MAX_SHAPES = 8, 16
"""Argument trees with static arguments, meshes and configurations; executables for each of them."""


class FastPaths:
    """The executables of the latest calls of one function."""

    def __init__(self, signature: Signature):
        self.signature = signature
        self.layouts: dict[tuple[Any, ...], Layout] = {}
        self.calls: list[_Call] = []

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs the executable of a previous call.

        Raises:
            ArgumentMismatch: the call differs from the previous ones; nothing was run.
        """
        calls = self.calls
        if not calls:
            raise ArgumentMismatch
        statics = keywords = ()
        if kwargs or self.signature.static:
            keywords = tuple(kwargs)
            layout = self.layouts.get((len(args), *keywords))
            if layout is None:
                raise ArgumentMismatch
            args, statics = layout.split(args, kwargs)
        leaves, tree = jax.tree.flatten(args)
        if self.signature.mutable != frozenset() and len({*map(id, leaves)}) < len(leaves):
            raise ArgumentMismatch  # it may be tied otherwise than those of previous calls
        mesh, context = current(), context_key()
        for call in calls:
            if call.mesh is mesh and call.tree == tree and call.context == context and call.is_for(statics, keywords):
                return call.run(leaves, args)
        raise ArgumentMismatch

    def add(self, call: Arguments, executable: Executable, misplaced: tuple[int, ...], mesh: AnyMesh) -> None:
        """Adds the executable of a call."""
        if not isinstance(mesh, Mesh) or compat.in_trace():
            return
        layout = Layout.of(self.signature, call.num_args, call.keywords)
        self.layouts[call.num_args, *call.keywords] = layout
        key = mesh, call.tree, context_key(), call.statics, call.keywords
        found = next((c for c in self.calls if c.mesh is mesh and c.key == key[1:]), None)
        is_new = found is None
        found = found or _Call(*key)
        found.add(_FastPath(executable, misplaced, [*map(leaf_key, call.leaves)]))
        if is_new:
            self.calls = [found, *self.calls[: MAX_CALLS - 1]]  # a new list: other threads may read the old one

    def clear(self) -> None:
        """Forgets all executables."""
        self.calls = []


@dataclass(slots=True, eq=False)
class _FastPath:
    executable: Executable
    misplaced: tuple[int, ...]
    """The leaves that had to be transferred, such as a batch read from a file."""
    leaf_keys: Sequence[LeafKey]

    def run(self, leaves: list[Any], args: tuple[Any, ...]) -> Any:
        executable = self.executable
        misplaced = self.misplaced
        if misplaced:
            required = executable.in_formats
            misplaced = tuple([i for i in misplaced if needs_transfer(leaves[i], required[i])])
            # One that is committed elsewhere may contradict a spec, which is an error.
            if any(compat.is_committed(leaves[i]) and leaf_key(leaves[i]) != self.leaf_keys[i] for i in misplaced):
                raise ArgumentMismatch
        placed = leaves
        if misplaced:
            placed = [x for i, x in enumerate(leaves) if i not in misplaced]
        if not compat.are_committed(placed):
            raise ArgumentMismatch
        executable.ran_on_fast_path = True
        return executable.run_again(leaves, misplaced, args)


@dataclass(slots=True, eq=False)
class _Call:
    """What a call depends on beside the shapes and shardings of its arguments, and the executables for these."""

    mesh: Mesh
    tree: Any
    context: Any
    statics: tuple[Any, ...]
    keywords: tuple[str, ...]
    paths: tuple[Sequence[_FastPath], Sequence[int]] = (), ()
    """The executables, and the leaves that differ between any two of them: both at once, for other threads."""

    @property
    def key(self) -> tuple[Any, ...]:
        return self.tree, self.context, self.statics, self.keywords

    def is_for(self, statics: tuple[Any, ...], keywords: tuple[str, ...]) -> bool:
        return self.statics == statics and self.keywords == keywords

    def run(self, leaves: list[Any], args: tuple[Any, ...]) -> Any:
        paths, distinguishing = self.paths
        if not distinguishing:
            return paths[0].run(leaves, args)
        try:
            keys = [(i, leaf_key(leaves[i])) for i in distinguishing]
        except TypeError as error:
            raise ArgumentMismatch from error
        for path in paths:
            if all(path.leaf_keys[i] == key for i, key in keys):
                return path.run(leaves, args)
        raise ArgumentMismatch

    def add(self, path: _FastPath) -> None:
        others = [p for p in self.paths[0] if self._differing(p, path) is not None]
        paths = [path, *others[: MAX_SHAPES - 1]]
        pairs = [(a, b) for k, a in enumerate(paths) for b in paths[:k]]
        found: list[int] = []
        for a, b in pairs:
            if all(a.leaf_keys[i] == b.leaf_keys[i] for i in found):
                found += [i for i in [self._differing(a, b)] if i is not None]
        self.paths = paths, found

    @staticmethod
    def _differing(one: _FastPath, other: _FastPath) -> int | None:
        pairs = enumerate(zip(one.leaf_keys, other.leaf_keys, strict=True))
        return next((i for i, (a, b) in pairs if a != b), None)
