"""The fast path of dispatch: the executable of the previous call, without computing a cache key.

A program on a few hundred small arrays is dispatched in less than a millisecond, so every Python operation per array
counts. The fast path checks only that all leaves are committed arrays; `jax.jit` compares shapes, dtypes and shardings
anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from .. import compat
from ..mesh import current
from .cache_key import context_key
from .executable import ArgumentMismatch, Executable, needs_transfer


@dataclass(frozen=True, slots=True, eq=False)
class FastPath:
    """The executable of the previous call, and what it depends on: the mesh, the argument tree, JAX's configuration."""

    executable: Executable
    mesh: Mesh
    tree: Any
    context: Any
    misplaced: tuple[int, ...]
    """The leaves that had to be transferred, such as a batch read from a file."""

    def __call__(self, args: Sequence[Any]) -> Any:
        """Runs the executable on a tuple of non-static arguments.

        Raises:
            ArgumentMismatch: the call differs from the previous one; nothing was run.
        """
        leaves, tree = jax.tree.flatten(args)
        if tree != self.tree or current() is not self.mesh or context_key() != self.context:
            raise ArgumentMismatch
        if self.misplaced:
            self._transfer(leaves)
        if not compat.are_committed(leaves):
            raise ArgumentMismatch
        return self.executable.run_committed(leaves)

    def _transfer(self, leaves: list[Any]) -> None:
        targets = [self.executable.in_shardings[i] for i in self.misplaced]
        before = [leaves[i] for i in self.misplaced]
        if not all(map(needs_transfer, before, targets)):  # e.g. a state that is now a result of the step
            raise ArgumentMismatch
        try:
            self.executable.placed_arguments.move(leaves, self.misplaced, self.executable.in_shardings)
        except (TypeError, ValueError) as error:
            raise ArgumentMismatch from error
