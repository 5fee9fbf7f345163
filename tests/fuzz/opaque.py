"""Ops that no sharding rule describes: primitives of other packages, custom partitionings, foreign functions."""

from __future__ import annotations

from .builder import Builder


def mirror(g: Builder) -> None:
    x = g.float(1, 4)
    f = g.facts[x]
    g.emit("own primitive", "mirror($0)", [x], bound=f.bound / 2, grid=None if f.grid is None else f.grid + 1)


def partitioned(g: Builder) -> None:
    """A `custom_partitioning` with a rule, or with one that is computed."""
    x = g.float(1, 3, wanted=lambda f: f.type.dtype == "F")
    op = g.choice(["own_sin", "own_cos"])
    g.emit("custom_partitioning", f"{op}(lax.stop_gradient($0))", [x], bound=1)


def foreign(g: Builder) -> None:
    x = g.float(2, 3, wanted=lambda f: f.type.dtype == "F" and f.shape[-1] * f.shape[-2] <= 64)
    g.emit("ffi_call", "cholesky_by_ffi($0)", [x], bound=g.facts[x].bound * 4 + 1)


OPS = {mirror: 2, partitioned: 1, foreign: 1}
"""Op -> relative frequency."""
