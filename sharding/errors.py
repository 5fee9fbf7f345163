"""`ShardingError`, the library's exception, and the format of its message; warnings at the user's line.

A message has four parts: the request, what was found, what is required, and the nearest fix. Failures of one kind are
reported together.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

_LABELS = ("found", "required", "fix")
_MARGIN = max(len(label) for label in _LABELS) + 2


class ShardingError(ValueError):
    """An invalid request, raised before anything compiles.

    Args:
        asked: the request: function, argument, path.
        found: shape, spec, mesh, the arithmetic; one line or several.
        required: the condition that does not hold.
        fix: the nearest valid requests; one line or several.

    Example:
        >>> print(ShardingError("mesh(data=3)", found="8 devices", required="a product of 8", fix="mesh(data=8)"))
        mesh(data=3)
          found:    8 devices
          required: a product of 8
          fix:      mesh(data=8)
    """

    def __init__(
        self, asked: str, *, found: str | Sequence[str] = (), required: str = "", fix: str | Sequence[str] = ()
    ):
        self.asked = asked
        self.found = _lines(found)
        self.required = required
        self.fix = _lines(fix)
        parts = zip(_LABELS, (self.found, _lines(required), self.fix), strict=True)
        super().__init__("\n".join([asked, *(line for label, lines in parts for line in _labelled(label, lines))]))


def together(asked: str, failures: Sequence[ShardingError]) -> ShardingError:
    """One error for all failures of one kind; a single failure is returned unchanged.

    A requirement or fix that all failures share is written once, at the end.

    Args:
        asked: the request they are all part of, for example ``"step: in_shardings"``.
        failures: at least one.
    """
    if len(failures) == 1:
        return failures[0]
    requirements = dict.fromkeys(failure.required for failure in failures)
    fixes = dict.fromkeys(failure.fix for failure in failures)
    required, fix = (
        next(iter(requirements)) if len(requirements) == 1 else "",
        next(iter(fixes)) if len(fixes) == 1 else (),
    )
    parts = [
        ShardingError(f.asked, found=f.found, required="" if required else f.required, fix=() if fix else f.fix)
        for f in failures
    ]
    listed = [line for i, part in enumerate(parts, 1) for line in _numbered(i, str(part))]
    return ShardingError("\n".join([f"{asked}: {len(failures)} failures", *listed]), required=required, fix=fix)


def raise_together(asked: str, failures: Sequence[ShardingError]) -> None:
    """Raises ``together(asked, failures)`` if there are any."""
    if failures:
        raise together(asked, failures)


def warn(text: str) -> None:
    """Warns at the innermost line that is not of this package."""
    package, level, frame = f"{Path(__file__).parent}{os.sep}", 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(package):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


def _lines(text: str | Sequence[str]) -> tuple[str, ...]:
    """The non-empty lines of one or several texts."""
    texts = (text,) if isinstance(text, str) else text
    return tuple(line for one in texts for line in one.splitlines() if line)


def _labelled(label: str, lines: Sequence[str]) -> list[str]:
    heads = [f"{label}:".ljust(_MARGIN), *[" " * _MARGIN] * (len(lines) - 1)]
    return [f"  {head}{line}" for head, line in zip(heads, lines, strict=False)]


def _numbered(number: int, text: str) -> list[str]:
    head = f"  {number}. "
    first, *rest = text.splitlines()
    return [head + first, *(" " * len(head) + line for line in rest)]
