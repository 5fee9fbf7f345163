"""Lookup of values by path, the end of a path, a glob, the name given to `annotate`, or where they are computed."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from ..errors import ShardingError
from .globs import Glob

MAX_LISTED = 8
"""Matches that an error lists."""


def find(names: Mapping[str, int], name: str, spec_of: Callable[[int], Any], places: Places | None = None) -> int:
    """The value with this name.

    Args:
        names: path or name -> value.
        name: as for `find_all`.
        spec_of: value -> spec; several matches with equal specs count as one.
        places: as for `find_all`.

    Raises:
        ShardingError: no match, or several with different specs.
    """
    hits = find_all(names, name, places)
    if len({spec_of(v) for v in hits.values()}) == 1:
        return next(iter(hits.values()))
    raise ambiguous(name, {label: str(spec_of(v)) for label, v in hits.items()}, "sharded differently")


def ambiguous(name: str, candidates: Mapping[str, str], differ: str) -> ShardingError:
    """The error of a name with several values.

    Args:
        name: as asked.
        candidates: a unique name of each -> what is to be said of it.
        differ: how they differ.
    """
    lines = [f"{label}: {what}" for label, what in candidates.items()]
    left = len(lines) - MAX_LISTED
    more = [f"and {left} more"] if left > 0 else []
    return ShardingError(
        f"the value {name!r}",
        found=[f"{len(lines)} values of that name, {differ}:", *lines[:MAX_LISTED], *more],
        required="a unique name or end of a path, or matches that are sharded identically",
        fix=next(iter(candidates)),
    )


class Places(Protocol):
    """Finds unnamed values by where they are computed."""

    def find(self, name: str) -> Mapping[str, int]:
        """Unique name -> value; empty if the name is no place."""
        ...

    def near(self, name: str) -> list[str]:
        """Names of places like this one."""
        ...


def find_all(names: Mapping[str, int], name: str, places: Places | None = None) -> dict[str, int]:
    """Unique name -> value of all that a name matches; an error if there is none.

    Args:
        names: path or name -> value.
        name: one of them, or else a `Glob` over them, or else what `places` knows.
        places: of unnamed values.
    """
    hits = [name] if name in names else Glob(name).among(names)
    found = {hit: names[hit] for hit in hits} or (dict(places.find(name)) if places is not None else {})
    if found:
        return found
    where = ", the module or the line that computes it" if places is not None else ""
    near = _nearest(name, names)
    raise ShardingError(
        f"the value {name!r}",
        found=f"no argument, result or annotated value of that name among {len(names)}",
        required=f"a path, the end of one, a glob over paths, a name given to annotate{where}",
        fix=near if places is None else [*near, *places.near(name)][:MAX_LISTED],
    )


def _nearest(name: str, names: Iterable[str]) -> list[str]:
    ends = {n.rpartition("/")[2]: n for n in names}
    close = difflib.get_close_matches(name, list(names), n=3, cutoff=0.4)
    return close or [ends[e] for e in difflib.get_close_matches(name, list(ends), n=3, cutoff=0.4)]
