"""Training steps whose weights are stored over the axes of the batch, as FSDP and ZeRO store them."""

from __future__ import annotations

import math

from .builder import Builder, Facts, SkipOp
from .case import SpecData, Type
from .control import Grow, with_bodies

LAYER_CALLS = {
    "scan": "scan($f0, 1, {n}, $0, $1, $2)",
    "scan with checkpoint": "scan(jax.checkpoint($f0), 1, {n}, $0, $1, $2)",
    "scan with checkpoint by policy": (
        "scan(jax.checkpoint($f0, policy=jax.checkpoint_policies.dots_saveable), 1, {n}, $0, $1, $2)"
    ),
    "scan with offloading": "scan(lambda *xs: offloaded($f0, *xs), 1, {n}, $0, $1, $2)",
}


def layers(g: Builder, grow: Grow) -> None:
    """At the start of a program: layers whose weights carry axes of the batch on a dim; differentiated."""
    axes = [a for a, n in g.mesh.items() if n > 1]
    batch = tuple(sorted(g.rng.sample(axes, g.rng.randint(1, len(axes)))))
    features, hidden, n = g.choice([4, 8]), g.choice([8, 16]), g.choice([2, 3])
    x = g.argument(Type(shape=(math.prod(g.mesh[a] for a in batch) * g.choice([1, 2, 3]), features), dtype="F"))
    g.given[x] = (batch if len(batch) > 1 else batch[0],)
    ws = [g.argument(Type(shape=shape, dtype="F")) for shape in ((n, features, hidden), (n, hidden, features))]
    for w in ws:
        g.given[w] = _stored(g, g.facts[w].shape, batch)
    g.trained += ws if g.chance(0.8) else [x, *ws]
    carry = Facts(type=g.facts[x].type, bound=2.0)
    rows = [Facts(type=Type(shape=g.facts[w].shape[1:], dtype="F"), bound=2.0) for w in ws]
    h, up, down = g.open([carry, *rows], closed=False)
    try:
        mixed = g.emit("dot_general", "jnp.tanh($0 @ $1)", [h, up], bound=1)
        if g.chance(0.4):
            grow(g, 1)
        out = g.emit("dot_general", "jnp.tanh($0 + $1 @ $2)", [h, mixed, down], bound=1)
    except SkipOp:
        del g.frames[1:]
        raise
    op = g.choice(list(LAYER_CALLS))
    result = Facts(type=carry.type, bound=2.0)
    with_bodies(g, op, LAYER_CALLS[op].format(n=n), [x, *ws], [result], [g.close([out])])


def _stored(g: Builder, shape: tuple[int, ...], batch: tuple[str, ...]) -> SpecData:
    """A spec with an axis of the batch on one of the dims, and perhaps others on the rest."""
    spec = list(g.spec(shape, divides=True, open_dims=0.1))
    spec += [None] * (len(shape) - len(spec))
    axis, dim = g.choice(batch), g.choice([1, 2])
    if shape[dim] % g.mesh[axis]:
        return tuple(spec)

    def without(entry):
        if isinstance(entry, tuple):
            return tuple(a for a in entry if a != axis) or None
        return None if entry == axis else entry

    spec = [without(entry) for entry in spec]
    spec[dim] = axis
    return tuple(spec)
