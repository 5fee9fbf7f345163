"""What others find out about a program, kept beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Found = TypeVar("Found")


class DerivedFacts:
    """Has what others find out about it, each under a key."""

    derived: dict[str, Any]

    def once(self, key: str, find: Callable[[], Found]) -> Found:
        """What `find` finds out, which is kept under a key."""
        if key not in self.derived:
            self.derived[key] = find()
        found: Found = self.derived[key]
        return found
