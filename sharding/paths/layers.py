"""`Layers`: components of paths that number equal layers, such as `blocks/0`, `layer_0`, `Dense_3` and `h1_up`."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

_INDEX = re.compile(r"(?<=[/#])\d+(?=[/ ,]|$)")
_NUMBERED = re.compile(r"(.*?)\d+(|_\D*)", re.DOTALL)


@dataclass(frozen=True)
class Layers:
    """The numbered components of a program's names that stand for equal layers.

    A key that is only an index is one. A name that ends in digits, or in digits and a word (`h0_up`), is one if it has
    siblings of the same name but for the digits with the same structure below: the same paths, with arrays of the same
    shapes. So `layer_0` and `layer_1` are layers, while the matrices `w1` and `w2` are not.
    """

    stars: Mapping[str, str] = field(default_factory=dict)
    """Component -> the same with `*` for its number: `layer_0` -> `layer_*`."""

    @staticmethod
    def of(shapes: Mapping[str, Any]) -> Layers:
        """The layers among names.

        Args:
            shapes: path -> shape, or whatever else must be equal.
        """
        tree: dict[str, Any] = {}
        for path, shape in shapes.items():
            *parents, last = path.split("/")
            node = tree
            for part in parents:
                below = node.setdefault(part, {})
                node = below if isinstance(below, dict) else node
            node.setdefault(last, shape)
        return Layers(dict(_stars(tree)))

    def pattern(self, text: str) -> str:
        """A path, or a text with paths in it, with `*` for the number of each layer: equal layers give equal texts."""
        starred = self._components.sub(lambda found: self.stars[found[0]], text) if self._components else text
        return _INDEX.sub("*", starred)

    @cached_property
    def _components(self) -> re.Pattern[str] | None:
        longest_first = sorted(self.stars, key=lambda name: (-len(name), name))
        names = "|".join(map(re.escape, longest_first))
        return re.compile(rf"(?<![\w.])(?:{names})(?=/)") if names else None

    def merged(self, rows: Iterable[tuple[str, *tuple[Any, ...]]]) -> list[tuple[str, list[int]]]:
        """Rows of equal layers together: the merged name, and the indices of its rows, in order of the first ones.

        Args:
            rows: a name, then whatever else must be equal.
        """
        groups: defaultdict[tuple[Any, ...], list[tuple[int, str]]] = defaultdict(list)
        for k, (name, *rest) in enumerate(rows):
            groups[self.pattern(name), *rest].append((k, name))
        return [(merged_name([name for _, name in found]), [k for k, _ in found]) for found in groups.values()]


def _stars(tree: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    alike: defaultdict[tuple[str, Any], list[str]] = defaultdict(list)
    """The name with a star and the structure below -> names."""
    for name, below in tree.items():
        if isinstance(below, dict):
            numbered = _NUMBERED.fullmatch(name)
            if numbered is not None and numbered[1]:
                alike[f"{numbered[1]}*{numbered[2]}", _structure(below)].append(name)
            yield from _stars(below)
    for (star, _), names in alike.items():
        if len(names) > 1:
            yield from ((name, star) for name in names)


def _structure(tree: Mapping[str, Any]) -> Any:
    return frozenset((k, _structure(v) if isinstance(v, dict) else v) for k, v in tree.items())


def merged_name(names: Sequence[str]) -> str:
    """One text for names that differ only in numbers: `*` where they differ, and their count."""
    if len(names) == 1:
        return names[0]
    if len({name.count("/") for name in names}) > 1:
        return f"{names[0]} and others (x{len(names)})"
    columns = zip(*(name.split("/") for name in names), strict=True)
    return "/".join(c[0] if len(set(c)) == 1 else re.sub(r"\d+", "*", c[0]) for c in columns) + f" (x{len(names)})"
