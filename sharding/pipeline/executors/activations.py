"""Activations passed between stages: pytrees flattened to arrays, differentiable ones separate from the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ... import compat

Arrays = list[Any]


class Activation(NamedTuple):
    """The flattened arrays passed between stages."""

    floats: Arrays
    """Differentiable arrays."""
    others: Arrays
    """Arrays of other types, such as tokens; PRNG keys as key data."""


EMPTY = Activation([], [])


@dataclass(frozen=True, kw_only=True)
class ActivationTree:
    """The pytree structure of the activations passed between stages."""

    tree: Any
    leaves: tuple[Any, ...]
    """Shapes and dtypes."""

    @classmethod
    def of(cls, x: Any) -> ActivationTree:
        """The structure of arrays, or of their shapes."""
        leaves, tree = jax.tree.flatten(x)
        return cls(tree=tree, leaves=tuple(leaves))

    def flatten(self, x: Any) -> Activation:
        """A pytree as flat arrays."""
        leaves = jax.tree.leaves(x)
        return Activation(
            [leaf for leaf in leaves if is_float(leaf)],
            [
                jax.random.key_data(leaf) if compat.is_extended(leaf.dtype) else leaf
                for leaf in leaves
                if not is_float(leaf)
            ],
        )

    def unflatten(self, activation: Activation) -> Any:
        """The pytree of flat arrays."""
        floats, others = iter(activation.floats), iter(activation.others)
        return jax.tree.unflatten(
            self.tree, [next(floats) if is_float(leaf) else _rewrapped(next(others), leaf) for leaf in self.leaves]
        )


def is_float(x: Any) -> bool:
    """Whether an array is differentiable."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _rewrapped(numbers: Any, leaf: Any) -> Any:
    return compat.wrapped_key(numbers, leaf.dtype) if compat.is_extended(leaf.dtype) else numbers
