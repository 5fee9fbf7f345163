"""Layouts of arguments and results in memory: a `Format` in `in_shardings` or `out_shardings`, as for `jax.jit`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.experimental.layout import Format, Layout, with_layout_constraint
from jax.sharding import Sharding

Layouts = Sequence[Any]
"""Per leaf a `Layout`, `Layout.AUTO` (the compiler chooses), or None (that of the array, or the default)."""


def layouts(entries: Sequence[Any], ties: Mapping[int, int] | None = None, of_arguments: Layouts = ()) -> Layouts:
    """What entries of `in_shardings` or `out_shardings` say of layouts; empty if they say nothing.

    Args:
        entries: one per leaf.
        ties: result -> argument pairs, such as the state of a training loop: the result has the argument's layout.
        of_arguments: the layouts of the arguments.
    """
    found = [entry.layout if isinstance(entry, Format) else None for entry in entries]
    for result, leaf in (ties or {}).items():
        if of_arguments and found[result] is None and isinstance(of_arguments[leaf], Layout):
            found[result] = of_arguments[leaf]
    return found if any(one is not None for one in found) else ()


def without_layout(entry: Any) -> Any:
    """An entry of `in_shardings` or `out_shardings` without its layout."""
    return entry.sharding if isinstance(entry, Format) else entry


def with_layouts(shardings: Sequence[Sharding | None], asked: Layouts) -> tuple[Any, ...]:
    """Shardings, as Formats where a layout is asked for."""
    if not asked:
        return tuple(shardings)
    pairs = zip(shardings, asked, strict=True)
    return tuple(sharding if layout is None else Format(layout, sharding) for sharding, layout in pairs)


def constrained_inside(run: Callable[..., list[Any]], of_arguments: Layouts, of_results: Layouts) -> Any:
    """A function of flat arrays inside another trace, whose arguments and results are constrained to layouts."""
    if not of_arguments and not of_results:
        return run

    @functools.wraps(run)
    def constrained(*leaves: Any) -> list[Any]:
        return _constrained(run(*_constrained(leaves, of_arguments)), of_results)

    return constrained


def _constrained(values: Sequence[Any], asked: Layouts) -> list[Any]:
    pairs = zip(values, asked, strict=True) if asked else ((x, None) for x in values)
    return [with_layout_constraint(x, layout) if isinstance(layout, Layout) else x for x, layout in pairs]
