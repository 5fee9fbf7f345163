"""The flax nnx Variables in a pytree, and those that occur in it twice, such as tied weights."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import jax


def variables(args: Any) -> Iterator[tuple[range, Any]]:
    """The Variables of a pytree, each with its range of leaves; none unless flax is loaded."""
    nnx: Any = sys.modules.get("flax.nnx")
    if nnx is None:
        return
    at = 0
    for part in jax.tree.leaves(args, is_leaf=lambda x: isinstance(x, nnx.Variable)):
        number = len(jax.tree.leaves(part)) if isinstance(part, nnx.Variable) else 1
        if isinstance(part, nnx.Variable):
            yield range(at, at + number), part
        at += number


def ties(args: Any) -> dict[int, int]:
    """Each leaf of a Variable that has occurred before -> the leaf of its first occurrence."""
    first: dict[int, range] = {}
    found: dict[int, int] = {}
    for leaves, variable in variables(args):
        found.update(zip(leaves, first.setdefault(id(variable), leaves), strict=True))
    return {leaf: of for leaf, of in found.items() if leaf != of}


def tied(args: Any, like: Any) -> Any:
    """A copy of a pytree in which those Variables are one that are one in another pytree of the same structure."""
    nnx: Any = sys.modules["flax.nnx"]

    def is_variable(x: Any) -> bool:
        return isinstance(x, nnx.Variable)

    parts, tree = jax.tree.flatten(args, is_leaf=is_variable)
    first: dict[int, Any] = {}
    for k, original in enumerate(jax.tree.leaves(like, is_leaf=is_variable)):
        if is_variable(original):
            parts[k] = first.setdefault(id(original), parts[k])
    return jax.tree.unflatten(tree, parts)
