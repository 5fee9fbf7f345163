"""The one error of the library, and the form of its message.

A message answers four questions in this order: what was asked, what is there, what must hold, and what is the
nearest thing that works. Failures of one kind are reported together.
"""

from __future__ import annotations

from collections.abc import Sequence

_LABELS = ("there is", "must hold", "try")
_MARGIN = max(len(label) for label in _LABELS) + 2


class ShardingError(ValueError):
    """A request that cannot be met, found before anything compiles.

    Args:
        asked: what was asked for: function, argument, path.
        there: what is there: shape, spec, mesh, the arithmetic. One line or several.
        must: what must hold for the request to be met.
        fix: the nearest things that work. One line or several.

    Example:
        >>> print(ShardingError("mesh(data=3)", there="8 devices", must="the sizes multiply to 8", fix="mesh(data=8)"))
        mesh(data=3)
          there is:  8 devices
          must hold: the sizes multiply to 8
          try:       mesh(data=8)
    """

    def __init__(self, asked: str, *, there: str | Sequence[str] = (), must: str = "", fix: str | Sequence[str] = ()):
        self.asked = asked
        self.there = _lines(there)
        self.must = must
        self.fix = _lines(fix)
        parts = zip(_LABELS, (self.there, _lines(must), self.fix), strict=True)
        super().__init__("\n".join([asked, *(line for label, lines in parts for line in _labelled(label, lines))]))


def together(asked: str, failures: Sequence[ShardingError]) -> ShardingError:
    """One error for all failures of one kind; a single failure is returned as it is.

    What several failures have in common (what must hold, what to try) is said once, at the end.

    Args:
        asked: the request that they are all part of, for example ``"step: in_shardings"``.
        failures: at least one.
    """
    if len(failures) == 1:
        return failures[0]
    musts = dict.fromkeys(failure.must for failure in failures)
    fixes = dict.fromkeys(failure.fix for failure in failures)
    must, fix = next(iter(musts)) if len(musts) == 1 else "", next(iter(fixes)) if len(fixes) == 1 else ()
    parts = [
        ShardingError(f.asked, there=f.there, must="" if must else f.must, fix=() if fix else f.fix) for f in failures
    ]
    listed = [line for i, part in enumerate(parts, 1) for line in _numbered(i, str(part))]
    return ShardingError("\n".join([f"{asked}: {len(failures)} failures", *listed]), must=must, fix=fix)


def raise_together(asked: str, failures: Sequence[ShardingError]) -> None:
    """Returns None when there are no failures; raises ``together(asked, failures)`` otherwise."""
    if failures:
        raise together(asked, failures)


def _lines(text: str | Sequence[str]) -> tuple[str, ...]:
    """The lines of a text or of several texts, empty ones left out."""
    texts = (text,) if isinstance(text, str) else text
    return tuple(line for one in texts for line in one.splitlines() if line)


def _labelled(label: str, lines: Sequence[str]) -> list[str]:
    heads = [f"{label}:".ljust(_MARGIN), *[" " * _MARGIN] * (len(lines) - 1)]
    return [f"  {head}{line}" for head, line in zip(heads, lines, strict=False)]


def _numbered(number: int, text: str) -> list[str]:
    head = f"  {number}. "
    first, *rest = text.splitlines()
    return [head + first, *(" " * len(head) + line for line in rest)]
