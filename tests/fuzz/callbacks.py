"""Callbacks into Python, whose arguments are compared, too."""

from __future__ import annotations

from .builder import Builder


def called_back(g: Builder) -> None:
    """An op that the host computes."""
    x = g.number(0, 4)
    f = g.facts[x]
    if f.type.dtype == "int32":
        return noticed(g)
    grid = None if f.grid is None else f.grid + 1
    if g.chance(0.7):
        way = g.choice(["sequential", "expand_dims", "broadcast_all"])
        g.emit("pure_callback", f'half_called_back($0, "{way}")', [x], bound=f.bound / 2, grid=grid)
    else:
        g.emit("io_callback", f'half_noted($0, "n{len(g.facts)}", {f.exact})', [x], bound=f.bound / 2, grid=grid)


def noticed(g: Builder) -> None:
    """A callback for its effect."""
    x = g.pick(lambda f: f.type.dtype != "key" and f.ndim < 4)
    f, tag = g.facts[x], f"n{len(g.facts)}"
    op = g.choice(["noted", "noted_in_order", "debugged", "printed"])
    if op == "printed" and not (f.exact and f.size <= 16):
        op = "debugged"
    text = f'printed($0, "{tag}")' if op == "printed" else f'{op}($0, "{tag}", {f.exact})'
    g.emit(f"callback, {op}", text, [x], bound=f.bound, grid=f.grid)


OPS = {called_back: 3, noticed: 5}
"""Op -> relative frequency."""
