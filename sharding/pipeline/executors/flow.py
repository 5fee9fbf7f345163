"""What passes from stage to stage: a pytree as flat arrays, those with a gradient apart from the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ... import compat

Arrays = list[Any]


class Flow(NamedTuple):
    """What passes from stage to stage, without its structure."""

    floats: Arrays
    """What has a gradient."""
    others: Arrays
    """Numbers of other types, such as tokens; random keys as their numbers."""


NOTHING = Flow([], [])


@dataclass(frozen=True, kw_only=True)
class Passing:
    """The structure of what passes from stage to stage."""

    tree: Any
    leaves: tuple[Any, ...]
    """Shapes and dtypes."""

    @classmethod
    def of(cls, x: Any) -> Passing:
        """That of arrays, or of their shapes."""
        leaves, tree = jax.tree.flatten(x)
        return cls(tree=tree, leaves=tuple(leaves))

    def flow(self, x: Any) -> Flow:
        """A pytree as arrays."""
        leaves = jax.tree.leaves(x)
        return Flow(
            [leaf for leaf in leaves if is_float(leaf)],
            [
                jax.random.key_data(leaf) if compat.is_extended(leaf.dtype) else leaf
                for leaf in leaves
                if not is_float(leaf)
            ],
        )

    def tree_of(self, flow: Flow) -> Any:
        """Arrays as the pytree that they were."""
        floats, others = iter(flow.floats), iter(flow.others)
        return jax.tree.unflatten(
            self.tree, [next(floats) if is_float(leaf) else _as(next(others), leaf) for leaf in self.leaves]
        )


def is_float(x: Any) -> bool:
    """Whether an array has a gradient."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _as(numbers: Any, leaf: Any) -> Any:
    return compat.wrapped_key(numbers, leaf.dtype) if compat.is_extended(leaf.dtype) else numbers
