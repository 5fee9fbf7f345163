"""Products of which only a slice is read, such as the logits of the last token, as products of slices.

Compilers for accelerators slice first too, through some of the elementwise ops between, but only where the slice is all
that reads the product; XLA:CPU computes and stores all of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.extend.core as jex

from .. import compat
from ..graph.straight_line import num_uses
from ..rules import ELEMENTWISE
from .equations import is_placed, traced

MOST_KEPT = 0.5
"""Of an array's elements, the most that a slice keeps: products of nearly all rows stay, whose sizes devices divide."""

MOST_BETWEEN = 32
"""Ops between a product and its slice, at most."""

Window = tuple[tuple[int, int, int], ...]
"""(start, limit, stride) of each dim."""


def sliced_first(eqns: Sequence[Any], outvars: Sequence[Any]) -> list[Any]:
    """The equations of a jaxpr, with each product that is only sliced computed of slices."""
    uses = num_uses(eqns, outvars)
    found: list[Any] = []
    removed: set[int] = set()
    makers: dict[Any, Any] = {}
    for eqn in eqns:
        if _keeps_little(eqn):
            search = _Slices(eqn, makers, uses)
            search.of(eqn.invars[0], _window(eqn), 0)
            if search.has_product:
                found += search.with_result(eqn.outvars[0])
                removed |= search.removed
                continue
        if len(eqn.outvars) == 1:
            makers[eqn.outvars[0]] = eqn
        found.append(eqn)
    return [e for e in found if id(e) not in removed]


def _keeps_little(eqn: Any) -> bool:
    """Whether an equation slices off most of an array; not in the body of a `shard_map`, nor over Explicit axes."""
    if eqn.primitive.name != "slice" or compat.is_literal(eqn.invars[0]):
        return False
    mesh = eqn.invars[0].aval.sharding.mesh
    if mesh.manual_axes or mesh.explicit_axes:
        return False
    kept, all_of_it = (math.prod(v.aval.shape) for v in (eqn.outvars[0], eqn.invars[0]))
    return kept <= MOST_KEPT * all_of_it


def _window(eqn: Any) -> Window:
    p = eqn.params
    strides = p["strides"] or (1,) * len(p["start_indices"])
    return tuple(zip(p["start_indices"], p["limit_indices"], strides, strict=True))


def _size(dim: tuple[int, int, int]) -> int:
    start, limit, stride = dim
    return -(-(limit - start) // stride)


class _Slices:
    """The equations that compute a slice from slices of what it is computed from."""

    def __init__(self, eqn: Any, makers: Mapping[Any, Any], uses: Mapping[Any, int]):
        self.eqn, self.makers, self.uses = eqn, makers, uses
        self.eqns: list[Any] = []
        self.removed: set[int] = set()
        self.has_product = False

    def with_result(self, result: Any) -> list[Any]:
        """The equations, of which the last one makes a given variable."""
        *others, last = self.eqns
        return [*others, last.replace(outvars=[result])]

    def of(self, v: Any, window: Window, depth: int) -> Any:
        """The variable that is a window of another one."""
        if all(dim == (0, n, 1) for dim, n in zip(window, v.aval.shape, strict=True)):
            return v
        maker = self.maker(v, depth)
        found = None if maker is None else self.through(maker, window, depth + 1)
        if found is not None:
            return found
        starts, limits, strides = zip(*window, strict=True)
        cut = partial(jax.lax.slice, start_indices=starts, limit_indices=limits, strides=strides)
        return self.add(traced(self.eqn, cut, [v]))

    def through(self, maker: Any, window: Window, depth: int) -> Any:
        """A window of the result of an equation, from windows of its operands; None if it is no product nor between."""
        name, params, operands = maker.primitive.name, maker.params, maker.invars
        if name == "dot_general" and not is_placed(maker):
            self.has_product = True
            windows = _of_factors(maker, window)
        elif name in ELEMENTWISE:
            windows = [_of_stretched(x, window) for x in operands]
        elif name == "broadcast_in_dim" and len(operands) == 1 and not is_placed(maker):
            windows = [_of_stretched(operands[0], [window[d] for d in params["broadcast_dimensions"]])]
        else:
            return None
        self.removed.add(id(maker))
        parts = [self.of(x, part, depth) for x, part in zip(operands, windows, strict=True)]
        shape = tuple(map(_size, window))
        if name == "broadcast_in_dim":
            dims = params["broadcast_dimensions"]
            return self.add(
                traced(maker, partial(jax.lax.broadcast_in_dim, shape=shape, broadcast_dimensions=dims), parts)
            )
        result = jex.Var(maker.outvars[0].aval.update(shape=shape))
        return self.add(compat.new_eqn(maker, parts, [result], maker.primitive, params))

    def maker(self, v: Any, depth: int) -> Any:
        """The equation that makes a variable which nothing else reads, if all it does is that; None for others."""
        is_only_sliced = not compat.is_literal(v) and self.uses[v] == 1 and depth <= MOST_BETWEEN
        maker = self.makers.get(v) if is_only_sliced else None
        return None if maker is None or maker.effects else maker

    def add(self, eqn: Any) -> Any:
        self.eqns.append(eqn)
        return eqn.outvars[0]


def _of_stretched(x: Any, window: Sequence[tuple[int, int, int]]) -> Window:
    """What of an operand a window of the result needs, whose dims of size 1 are stretched; all of a scalar."""
    return tuple((0, 1, 1) if n == 1 else dim for n, dim in zip(x.aval.shape, window, strict=False))


def _of_factors(product: Any, window: Window) -> tuple[Window, Window]:
    """What of the operands of a product a window of it needs."""
    summed, batch = product.params["dimension_numbers"]
    shapes = [v.aval.shape for v in product.invars]
    parts = [[(0, n, 1) for n in shape] for shape in shapes]
    dims = iter(window)
    for pair in zip(*batch, strict=True):
        dim = next(dims)
        for part, d in zip(parts, pair, strict=True):
            part[d] = dim
    for part, shape, taken in zip(parts, shapes, zip(summed, batch, strict=True), strict=True):
        for d in range(len(shape)):
            if d not in (*taken[0], *taken[1]):
                part[d] = next(dims)
    return tuple(parts[0]), tuple(parts[1])
