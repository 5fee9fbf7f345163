"""Names of arrays: the way to a leaf through arguments, dicts and attributes, as `state/params/blocks/0/mlp/w1`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from .errors import ShardingError


def text(key_path: tuple[Any, ...], prefix: str = "") -> str:
    """A pytree path with `/` between its keys; the trailing `value` of an nnx variable dropped."""
    path = jax.tree_util.keystr(key_path, simple=True, separator="/")
    path = path.removesuffix("/value") if path != "value" else ""
    return "/".join(part for part in (prefix, path) if part)


def of_tree(tree: Any, prefix: str = "") -> list[str]:
    """The path of every leaf, in order."""
    return [text(path, prefix) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def find(names: Mapping[str, int], wanted: str, same: Any) -> int:
    """The value with this name, or the only one whose path ends in it.

    Args:
        names: path or name -> value.
        wanted: a name, a path or the end of one.
        same: `same(value)` is what several matches must agree on to count as one.

    Raises:
        ShardingError: no match, or several that differ.
    """
    hits = find_all(names, wanted)
    if len({same(names[n]) for n in hits}) == 1:
        return names[hits[0]]
    raise ShardingError(
        f"the value {wanted!r}",
        there=[
            f"{len(hits)} values of that name, split differently:",
            *(f"{n}: {same(names[n])}" for n in hits[:8]),
        ],
        must="the end of a path names one value, or values that are split alike",
        fix=hits[0],
    )


def find_all(names: Mapping[str, int], wanted: str) -> list[str]:
    """The value with this name, or all whose path ends in it; an error if there is none."""
    if wanted in names:
        return [wanted]
    hits = [n for n in names if n.endswith("/" + wanted)] or _numbered(names, wanted)
    if hits:
        return hits
    raise ShardingError(
        f"the value {wanted!r}",
        there=f"no argument, result or annotated value of that name among {len(names)}",
        must="a path, the end of one, or a name given to annotate",
        fix=_nearest(wanted, names),
    )


def _numbered(names: Iterable[str], wanted: str) -> list[str]:
    return [n for n in names if n.rpartition("#")[0] == wanted]


def _nearest(wanted: str, names: Iterable[str]) -> list[str]:
    import difflib

    ends = {n.rpartition("/")[2]: n for n in names}
    close = difflib.get_close_matches(wanted, list(names), n=3, cutoff=0.4)
    return close or [ends[e] for e in difflib.get_close_matches(wanted, list(ends), n=3, cutoff=0.4)]


def pattern(text: str) -> str:
    """A name, or a text with names in it, with `*` for each number in them: layers that are alike have one."""
    return re.sub(r"(?<=[/#])\d+(?=[/ ,]|$)", "*", text)


def starred(names: Sequence[str]) -> str:
    """One text for names that differ in numbers only, with `*` where they differ and how many they are."""
    if len(names) == 1:
        return names[0]
    columns = zip(*(name.split("/") for name in names), strict=True)
    return "/".join(c[0] if len(set(c)) == 1 else re.sub(r"\d+", "*", c[0]) for c in columns) + f" (x{len(names)})"
