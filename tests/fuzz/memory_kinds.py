"""Values in the host's memory."""

from __future__ import annotations

from .builder import STORE, Builder, SkipOp
from .case import Type
from .control import on_host


def store(g: Builder) -> None:
    x = g.float(0, 4, wanted=lambda f: f.type.dtype == "F")
    f = g.facts[x]
    spec = None
    if len(g.frames) == 1 and g.chance(0.6):
        spec = g.spec(f.shape, divides=True, open_dims=0.0)
    g.emit("store in host memory", STORE, [x], bound=f.bound, grid=f.grid, spec=spec, place="pinned_host")


def fetch(g: Builder) -> None:
    x = _host_value(g)
    f = g.facts[x]
    spec = None
    if len(g.frames) == 1 and g.chance(0.4):
        spec = g.spec(f.shape, divides=True, open_dims=0.0)
    g.emit("fetch from host memory", 'put($0, $s, "device")', [x], bound=f.bound, grid=f.grid, spec=spec)


def compute(g: Builder) -> None:
    """An op on the host."""
    x = _host_value(g)
    f = g.facts[x]
    text = g.choice(["-$0", "$0 * 2", "$0.T"])
    bound, grid = (f.bound, f.grid) if text != "$0 * 2" else (2 * f.bound, f.grid)
    if bound > 4:
        raise SkipOp
    g.emit("op in host memory", text, [x], bound=bound, grid=grid, place="pinned_host")


def _host_value(g: Builder) -> int:
    """A value in the host's memory, or a new argument there."""
    if g.chance(0.3):
        return g.argument(Type(shape=g.shape(0, 3), dtype="F", place="pinned_host"))
    return on_host(g)


OPS = {store: 3, fetch: 4, compute: 1}
"""Op -> relative frequency."""
