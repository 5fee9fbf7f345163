"""The next step of a loop: the program of the call before, found without a cache key.

A program of a few hundred small arrays starts in less than a millisecond, and all that Python asks of each of them
counts, so this asks only whether they are there. Shapes, dtypes and shardings are compared by `jax.jit`, which does so
in any case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from . import compat, tracing
from .mesh import current
from .program import OtherArguments, Program, moves


@dataclass(frozen=True, slots=True, eq=False)
class Repeat:
    """A program that ran, with what was around its arguments: the mesh, their tree, JAX's configuration."""

    program: Program
    mesh: Mesh
    tree: Any
    context: Any
    unplaced: tuple[int, ...]
    """The leaves that had to be moved to their devices, as a batch that comes from a file."""

    def __call__(self, args: Sequence[Any]) -> Any:
        """The result of the program for a tuple of arguments, none of them static.

        Raises:
            OtherArguments: something is not as it was in the call before; nothing was run.
        """
        leaves, tree = jax.tree.flatten(args)
        if tree != self.tree or current() is not self.mesh or tracing.context() != self.context:
            raise OtherArguments
        if self.unplaced:
            self._move(leaves)
        if not compat.are_placed(leaves):
            raise OtherArguments
        return self.program.run_placed(leaves)

    def _move(self, leaves: list[Any]) -> None:
        wanted = [self.program.in_shardings[i] for i in self.unplaced]
        before = [leaves[i] for i in self.unplaced]
        if not all(map(moves, before, wanted)):  # a state that came from outside once and now from the step itself
            raise OtherArguments
        try:
            moved = jax.device_put(before, wanted)
        except (TypeError, ValueError) as error:
            raise OtherArguments from error
        for i, x in zip(self.unplaced, moved, strict=True):
            leaves[i] = x
