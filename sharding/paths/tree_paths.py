"""Paths of the leaves of a pytree."""

from __future__ import annotations

from typing import Any

import jax


def text(key_path: tuple[Any, ...], prefix: str = "") -> str:
    """A pytree path with `/` between its keys, without the trailing `value` of nnx variables and boxed parameters."""
    path = jax.tree_util.keystr(key_path, simple=True, separator="/")
    path = path.removesuffix("/value") if path != "value" else ""
    return "/".join(part for part in (prefix, path) if part)


def of_tree(tree: Any, prefix: str = "") -> list[str]:
    """The paths of all leaves, in order."""
    return [text(path, prefix) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
