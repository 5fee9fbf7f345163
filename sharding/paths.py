"""Array names: pytree paths such as `state/params/blocks/0/mlp/w1`, and lookup by them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from .errors import ShardingError


def text(key_path: tuple[Any, ...], prefix: str = "") -> str:
    """A pytree path with `/` between its keys, without the trailing `value` of nnx variables."""
    path = jax.tree_util.keystr(key_path, simple=True, separator="/")
    path = path.removesuffix("/value") if path != "value" else ""
    return "/".join(part for part in (prefix, path) if part)


def of_tree(tree: Any, prefix: str = "") -> list[str]:
    """The paths of all leaves, in order."""
    return [text(path, prefix) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def find(names: Mapping[str, int], name: str, spec_of: Callable[[int], Any]) -> int:
    """The value with this name, or whose path ends in it.

    Args:
        names: path or name -> value.
        name: a name, a path or the end of one.
        spec_of: value -> spec; several matches with equal specs count as one.

    Raises:
        ShardingError: no match, or several with different specs.
    """
    hits = find_all(names, name)
    if len({spec_of(names[n]) for n in hits}) == 1:
        return names[hits[0]]
    raise ShardingError(
        f"the value {name!r}",
        found=[
            f"{len(hits)} values of that name, sharded differently:",
            *(f"{n}: {spec_of(names[n])}" for n in hits[:8]),
        ],
        required="a unique name or end of a path, or matches that are sharded identically",
        fix=hits[0],
    )


def find_all(names: Mapping[str, int], name: str) -> list[str]:
    """The value with this name, or all whose path ends in it; an error if there is none."""
    if name in names:
        return [name]
    hits = [n for n in names if n.endswith("/" + name)] or _numbered(names, name)
    if hits:
        return hits
    raise ShardingError(
        f"the value {name!r}",
        found=f"no argument, result or annotated value of that name among {len(names)}",
        required="a path, the end of one, or a name given to annotate",
        fix=_nearest(name, names),
    )


def _numbered(names: Iterable[str], name: str) -> list[str]:
    return [n for n in names if n.rpartition("#")[0] == name]


def _nearest(name: str, names: Iterable[str]) -> list[str]:
    import difflib

    ends = {n.rpartition("/")[2]: n for n in names}
    close = difflib.get_close_matches(name, list(names), n=3, cutoff=0.4)
    return close or [ends[e] for e in difflib.get_close_matches(name, list(ends), n=3, cutoff=0.4)]


def pattern(text: str) -> str:
    """The text with `*` for each number in the names in it, so that identical layers have the same pattern."""
    return re.sub(r"(?<=[/#])\d+(?=[/ ,]|$)", "*", text)


def merged_name(names: Sequence[str]) -> str:
    """One text for names that differ only in numbers: `*` where they differ, and their count."""
    if len(names) == 1:
        return names[0]
    columns = zip(*(name.split("/") for name in names), strict=True)
    return "/".join(c[0] if len(set(c)) == 1 else re.sub(r"\d+", "*", c[0]) for c in columns) + f" (x{len(names)})"
