"""Activations passed between stages: pytrees flattened to arrays, differentiable ones separate from the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ... import compat, paths
from ...errors import ShardingError

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


def check_preserved(asked: str, x: Any, y: Any) -> None:
    """Raises if a stage changes the structure, shapes or dtypes of its activations."""
    asked, must = f"{asked}(stage_fn)", "an output of the input's structure, shapes and dtypes"
    if jax.tree.structure(x) != jax.tree.structure(y):
        found_text = [f"it gets {jax.tree.structure(x)}", f"it returns {jax.tree.structure(y)}"]
        raise ShardingError(asked, found=found_text, required=must)
    found_text = differences(x, y)
    if found_text:
        raise ShardingError(asked, found=found_text, required=must, fix="change shapes in first_fn and last_fn")


def differences(x: Any, y: Any) -> list[str]:
    """Leaves of two trees of one structure that differ in shape or dtype."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(x), jax.tree.leaves(y), strict=True)
    return [
        f"{paths.text(path) or 'x'}: it gets {array_type(a)}, it returns {array_type(b)}"
        for (path, a), b in pairs
        if (a.shape, a.dtype) != (b.shape, b.dtype)
    ]


def array_type(leaf: Any) -> str:
    """An array's dtype and shape as text."""
    return f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "shape") else type(leaf).__name__


def _rewrapped(numbers: Any, leaf: Any) -> Any:
    return compat.wrapped_key(numbers, leaf.dtype) if compat.is_extended(leaf.dtype) else numbers
