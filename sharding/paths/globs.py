"""`Glob`: which paths a path, the end of one, or a pattern with `*` matches; the same everywhere in the library."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from ..errors import ShardingError

_NUMBER = r"(?:#\d+)?\Z"


@dataclass(frozen=True, slots=True)
class Glob:
    """A pattern over paths.

    It matches from the start of any key to the end of the path: `mlp/w1` matches `blocks/0/mlp/w1`. `*` stands for any
    characters, `/` too, `?` for one, `[ab]` for one of several; a leading `*/` may be empty. Keys that are only an
    index may be left out, `blocks/mlp/w1`, and so may the number of a repeated name, `hidden` for `hidden#0`.
    """

    pattern: str

    def matches(self, path: str) -> bool:
        """Whether it matches a path."""
        regex = _regex(self.pattern)
        return path == self.pattern or any(regex.match(form) for form in (path, without_indices(path)))

    def among(self, paths: Iterable[str]) -> list[str]:
        """The paths that it matches, in their order."""
        last = self.pattern.rpartition("/")[2]
        text = "" if any(c in last for c in "*?[") else last  # that each of them contains
        return [path for path in paths if text in path and self.matches(path)]


@lru_cache(maxsize=1024)
def _regex(pattern: str) -> re.Pattern[str]:
    glob = fnmatch.translate(pattern.removeprefix("*/"))
    return re.compile(r"(?:.*/)?" + glob.removesuffix(r"\Z").removesuffix(r"\z") + _NUMBER, re.DOTALL)


def without_indices(path: str) -> str:
    """The path without keys that are only an index."""
    return "/".join(part for part in path.split("/") if not part.isdigit())


def unmatched(asked: str, pattern: str, paths: Iterable[str]) -> ShardingError | None:
    """The error of a pattern that matches none of the paths, which suggests the nearest ones; None if it matches one.

    Args:
        asked: the request, for the error.
        pattern: the pattern.
        paths: of the parameters.
    """
    known, glob = list(paths), Glob(pattern)
    if any(map(glob.matches, known)):
        return None
    return ShardingError(
        asked,
        found=f"no match among {len(known)} paths",
        required="a parameter that the pattern matches, by its path or the end of it",
        fix=difflib.get_close_matches(pattern, sorted({without_indices(path) for path in known}), n=3, cutoff=0),
    )
