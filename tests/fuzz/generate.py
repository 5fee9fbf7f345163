"""Random cases."""

from __future__ import annotations

import random

from hypothesis import strategies as st

from . import control, elementwise, indexing, numbers, shapes
from .builder import Builder, SkipOp
from .case import Argument, Case, Record, SpecData

MESHES = (
    {"a": 2},
    {"a": 4},
    {"a": 8},
    {"a": 2, "b": 2},
    {"a": 2, "b": 4},
    {"a": 4, "b": 2},
    {"a": 2, "b": 2, "c": 2},
    {"a": 1, "b": 8},
    {"a": 3, "b": 2},
)

FLAT = [*elementwise.OPS.items(), *shapes.OPS.items(), *numbers.OPS.items(), *indexing.OPS.items()]
DEEP = list(control.OPS.items())
SOFT = {"F"}
"""Types of differentiable arguments."""


def grow(g: Builder, n: int) -> None:
    """Adds about n random ops to the innermost body."""
    ops, weights = zip(*FLAT, strict=True)
    deep, deep_weights = zip(*DEEP, strict=True)
    for _ in range(n):
        for _ in range(4):  # an op without suitable operands is replaced by another
            frames, records = len(g.frames), len(g.frames[-1].records)
            try:
                if g.chance(0.13):
                    g.rng.choices(deep, deep_weights)[0](g, grow)
                else:
                    g.rng.choices(ops, weights)[0](g)
                break
            except SkipOp:
                assert len(g.frames) == frames and len(g.frames[-1].records) >= records


def generate(rng: random.Random) -> Case:
    """A random case of 3 to 15 ops, not counting those in bodies."""
    mesh = dict(rng.choice(MESHES))
    g = Builder(rng, mesh)
    g.argument(g.new_type(1))
    grow(g, rng.randint(3, 15))
    while not g.frames[0].records:
        grow(g, 3)
    records = tuple(g.frames[0].records)
    results = _results(g, records)
    by = _differentiated(g, results)
    counted = tuple(i for i, r in enumerate(results) if g.facts[r].type.dtype == "F") if by else ()
    arguments = _asked(g, with_gradients=bool(by))
    exact = tuple(g.facts[r].exact for r in results)
    gradients = [arguments[i].type for i in by]
    out_specs = None
    if rng.random() < 0.3:
        types = [*(g.facts[r].type for r in results), *gradients]
        out_specs = tuple(g.spec(t.shape, divides=True) if rng.random() < 0.5 else None for t in types)
    coarse = g.coarse or (bool(by) and any(f.type.dtype == "H" for f in g.facts.values()))
    return Case(
        mesh=tuple(mesh.items()),
        arguments=arguments,
        records=records,
        results=results,
        exact=(*exact, *[False] * len(by)),
        out_specs=out_specs,
        by=by,
        counted=counted,
        coarse=coarse,
    )


def _results(g: Builder, records: tuple[Record, ...]) -> tuple[int, ...]:
    """Unused values, and occasionally a used one."""
    made = [r for record in records for r in record.results]
    used = set(_used(records))
    ends = [r for r in made if r not in used]
    more = [r for r in made if r in used and g.chance(0.1)]
    return tuple((ends + more)[-8:])


def _used(records: tuple[Record, ...]):
    for record in records:
        yield from record.operands
        for body in record.bodies:
            yield from body.results
            yield from _used(body.records)


def _differentiated(g: Builder, results: tuple[int, ...]) -> tuple[int, ...]:
    """Arguments to differentiate with respect to, in half of the differentiable cases."""
    soft = tuple(i for i, a in enumerate(g.arguments) if a.type.dtype in SOFT)
    if not soft or not any(g.facts[r].type.dtype == "F" for r in results) or g.chance(0.5):
        return ()
    return soft if g.chance(0.7) else soft[:1]


def _asked(g: Builder, *, with_gradients: bool) -> tuple[Argument, ...]:
    """The arguments, some with specs, some placed before the call, occasionally one donated."""
    del with_gradients
    found = []
    for a in g.arguments:
        way, spec, placed = g.rng.random(), None, None
        if way < 0.5:
            spec = g.spec(a.type.shape, divides=True)
        elif way < 0.65:
            placed = closed(g.spec(a.type.shape, divides=True, open_dims=0.0))
        found.append(Argument(value=a.value, type=a.type, spec=spec, placed=placed, donated=g.chance(0.1)))
    return tuple(found)


def closed(spec: SpecData) -> SpecData:
    """A spec that an array can be placed with."""
    return tuple(tuple(a for a in e if a != "...") if isinstance(e, tuple) else None if e == "?" else e for e in spec)


def numbered(seed: int, number: int) -> Case:
    """Case `number` of a seed, the same on every machine."""
    return generate(random.Random(f"{seed}/{number}"))


cases = st.randoms(use_true_random=False).map(generate)
"""Hypothesis strategy of random cases."""
