"""Ops that transpose, reshape, concatenate, slice and pad arrays."""

from __future__ import annotations

import math

from .builder import ELEMENTS, Builder, SkipOp


def kept(g: Builder, op: str, text: str, x: int) -> int:
    """An op with one operand that preserves its values."""
    return g.emit(op, text, [x], bound=g.facts[x].bound, grid=g.facts[x].grid)


def broadcast(g: Builder) -> None:
    x = g.any(0, 3)
    shape, places = list(g.facts[x].shape), list(range(g.facts[x].ndim))
    for _ in range(g.choice([1, 1, 2])):
        d = g.rng.randint(0, len(shape))
        shape.insert(d, g.size())
        places = [p + (p >= d) for p in places]
    if math.prod(shape) > ELEMENTS:
        raise SkipOp
    stretched = [p for p in places if shape[p] == 1]
    if stretched and g.chance(0.5):
        shape[stretched[0]] = g.size()
    kept(g, "broadcast_in_dim", f"lax.broadcast_in_dim($0, {tuple(shape)}, {tuple(places)})", x)


def reshape(g: Builder) -> None:
    """A reshape that merges dims, splits a dim, or both."""
    x = g.any(1)
    shape = list(g.facts[x].shape)
    for _ in range(g.choice([1, 1, 2, 3])):
        way = g.rng.random()
        if way < 0.4 and len(shape) > 1:
            d = g.rng.randrange(len(shape) - 1)
            shape[d : d + 2] = [shape[d] * shape[d + 1]]
        elif way < 0.8 and len(shape) < 5:
            d = g.rng.randrange(len(shape))
            parts = [k for k in range(1, shape[d] + 1) if shape[d] % k == 0]
            k = g.choice(parts)
            shape[d : d + 1] = [k, shape[d] // k]
        else:
            total = math.prod(shape)
            k = g.choice([k for k in range(1, total + 1) if total % k == 0])
            shape = [k, total // k]
    kept(g, "reshape", f"$0.reshape({tuple(shape)})", x)


def transpose(g: Builder) -> None:
    x = g.any(2)
    order = list(range(g.facts[x].ndim))
    g.rng.shuffle(order)
    kept(g, "transpose", f"jnp.transpose($0, {tuple(order)})", x)


def squeeze(g: Builder) -> None:
    x = g.any(1)
    ones = [d for d, n in enumerate(g.facts[x].shape) if n == 1]
    if ones and g.chance(0.7):
        kept(g, "squeeze", f"jnp.squeeze($0, {g.choice(ones)})", x)
    else:
        kept(g, "expand_dims", f"jnp.expand_dims($0, {g.rng.randint(0, g.facts[x].ndim)})", x)


def concatenate(g: Builder) -> None:
    x = g.number(1)
    d = g.dim(x)
    parts = [x, *[g.like(x) for _ in range(g.choice([1, 1, 2]))]]
    facts = [g.facts[p] for p in parts]
    grid = max(f.grid for f in facts) if all(f.grid is not None for f in facts) else None
    bound = max(f.bound for f in facts)
    inside = ", ".join(f"${i}" for i in range(len(parts)))
    if g.chance(0.3) and facts[0].ndim < 4:
        g.emit("stack", f"jnp.stack([{inside}], {g.rng.randint(0, facts[0].ndim)})", parts, bound=bound, grid=grid)
    else:
        g.emit("concatenate", f"jnp.concatenate([{inside}], {d})", parts, bound=bound, grid=grid)


def pad(g: Builder) -> None:
    """A pad: negative widths crop, interior widths insert zeros."""
    x = g.number(1)
    f = g.facts[x]
    widths = []
    for n in f.shape:
        if g.chance(0.4):
            widths.append((0, 0, 0))
            continue
        low, high = g.choice([0, 1, 2, -1]), g.choice([0, 0, 1, 3, -1])
        inside = g.choice([0, 0, 1])
        if n + low + high + inside * (n - 1) < 1:
            low = high = 1
        widths.append((low, high, inside))
    zero = f"jnp.zeros((), {f.type.dtype_text})"
    kept(g, "pad", f"lax.pad($0, {zero}, {tuple(widths)})", x)


def cut(g: Builder) -> None:
    x = g.any(1)
    parts = []
    for n in g.facts[x].shape:
        start = g.rng.randint(0, n - 1)
        stop, step = g.rng.randint(start + 1, n), g.choice([1, 1, 2, 3])
        parts.append(g.choice([":", f"{start}:{stop}:{step}"]))
    kept(g, "slice", f"$0[{', '.join(parts)}]", x)


def rev(g: Builder) -> None:
    x = g.any(1)
    kept(g, "rev", f"jnp.flip($0, {g.dims(x)})", x)


def roll(g: Builder) -> None:
    x = g.number(1)
    kept(g, "roll", f"jnp.roll($0, {g.choice([1, 2, -1, 3])}, {g.dim(x)})", x)


def tile(g: Builder) -> None:
    x = g.number(1, 3)
    if g.chance(0.5):
        kept(g, "repeat", f"jnp.repeat($0, {g.choice([2, 3])}, {g.dim(x)})", x)
    else:
        times = tuple(g.choice([1, 2, 3]) for _ in g.facts[x].shape)
        kept(g, "tile", f"jnp.tile($0, {times})", x)


def split(g: Builder) -> None:
    """A split into parts of unequal size."""
    x = g.number(1)
    f, d = g.facts[x], g.dim(x)
    n = f.shape[d]
    if n < 2:
        raise SkipOp
    at = sorted(g.rng.sample(range(1, n), min(g.choice([1, 2]), n - 1)))

    def facts(kind):
        return g.checked(kind, f.bound, f.grid)

    g.emit_all("split", f"jnp.split($0, {at}, {d})", [x], facts)


def triangle(g: Builder) -> None:
    x = g.number(2)
    kept(g, "triangle", g.choice(["jnp.tril($0)", "jnp.triu($0, 1)"]), x)


def diagonal(g: Builder) -> None:
    x = g.number(1, 3)
    f = g.facts[x]
    if f.ndim == 1:
        kept(g, "diagonal", "jnp.diag($0)", x)
    else:
        kept(g, "diagonal", "jnp.diagonal($0, axis1=0, axis2=1)", x)


OPS = {
    broadcast: 4,
    reshape: 9,
    transpose: 5,
    squeeze: 3,
    concatenate: 5,
    pad: 4,
    cut: 4,
    rev: 2,
    roll: 2,
    tile: 2,
    split: 2,
    triangle: 1,
    diagonal: 1,
}
"""Op -> relative frequency."""
