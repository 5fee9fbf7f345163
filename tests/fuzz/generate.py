"""Random cases."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import strategies as st

from . import callbacks, control, elementwise, indexing, memory_kinds, numbers, opaque, refs, shapes, training
from .builder import Builder, SkipOp
from .case import Argument, Case, Record, SpecData, walk

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

ROOMS = (elementwise, shapes, numbers, indexing, memory_kinds, refs, callbacks, opaque)
FLAT = [item for room in ROOMS for item in room.OPS.items()]
DEEP = [*control.OPS.items(), (refs.rows, 1)]
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
    if trained := g.chance(0.12):
        training.layers(g, grow)
        grow(g, rng.randint(0, 8))
    else:
        g.argument(g.new_type(1))
        grow(g, rng.randint(3, 15))
    while not g.frames[0].records:
        grow(g, 3)
    records = tuple(g.frames[0].records)
    offloaded = any("offloading" in record.op for record in walk(records))
    if offloaded or any(f.type.place == "pinned_host" for f in g.facts.values()):
        records = unordered(records)
    ordered = any(record.op == ORDERED for record in walk(records))
    results = _results(g, records)
    by = _differentiated(g, results)
    counted = _counted(g, results) if by else ()
    arguments = _asked(g)
    exact = tuple(g.facts[r].exact for r in results)
    out_specs, out_kinds = _out_shardings(g, results, [arguments[i] for i in by], on_host=not ordered)
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
        out_kinds=out_kinds,
        keywords=rng.randint(1, len(arguments)) if g.chance(0.1) else 0,
        engine=rng.choices(("sharding", "shardy"), (16, 4))[0],  # XLA's own computes some wrongly, or aborts
        policy="shardy" if g.chance(0.4 if trained else 0.2) else "storage",
        explicit=g.chance(0.15),
    )


def _out_shardings(
    g: Builder, results: tuple[int, ...], differentiated: list[Argument], *, on_host: bool
) -> tuple[tuple[SpecData | None, ...] | None, tuple[str | None, ...]]:
    """Specs and kinds of memory of results and gradients, which are often those of the weights."""
    if not g.chance(0.3):
        return None, ()
    types = [*(g.facts[r].type for r in results), *(a.type for a in differentiated)]
    specs = [g.spec(t.shape, divides=True) if g.chance(0.5) else None for t in types]
    for k, a in enumerate(differentiated):
        if a.value in g.given and g.chance(0.6):
            specs[len(results) + k] = g.given[a.value]
    kinds: list[str | None] = [None] * len(types)
    for k, t in enumerate(types):
        if specs[k] is not None and t.place == "pinned_host":
            specs[k], kinds[k] = closed(specs[k]), "pinned_host"
        elif specs[k] is not None and t.dtype == "F" and on_host and g.chance(0.1):
            specs[k], kinds[k] = closed(specs[k]), "pinned_host"
    return tuple(specs), tuple(kinds) if any(kinds) else ()


ORDERED = "callback, noted_in_order"


def unordered(records: tuple[Record, ...]) -> tuple[Record, ...]:
    """The records with unordered callbacks instead of ordered ones, which JAX cannot combine with the host's memory."""
    found = []
    for r in records:
        bodies = tuple(replace(body, records=unordered(body.records)) for body in r.bodies)
        if r.op == ORDERED:
            r = replace(r, op="callback, noted", text=r.text.replace("noted_in_order", "noted"))
        found.append(replace(r, bodies=bodies))
    return tuple(found)


def _results(g: Builder, records: tuple[Record, ...]) -> tuple[int, ...]:
    """Unused values, and occasionally a used one."""
    made = [r for record in records for r in record.results if g.facts[r].type.place != "ref"]
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


def _counted(g: Builder, results: tuple[int, ...]) -> tuple[int, ...]:
    """The results whose sum can be differentiated."""
    types = [g.facts[r].type for r in results]
    return tuple(i for i, t in enumerate(types) if t.dtype == "F" and t.place == "device")


def _differentiated(g: Builder, results: tuple[int, ...]) -> tuple[int, ...]:
    """Arguments to differentiate with respect to, in half of the differentiable cases."""
    soft = tuple(i for i, a in enumerate(g.arguments) if a.type.dtype in SOFT)
    if any(a.type.place == "ref" for a in g.arguments):
        return ()
    if not _counted(g, results):
        return ()
    if trained := tuple(i for i, a in enumerate(g.arguments) if a.value in g.trained):
        return trained
    if not soft or g.chance(0.5):
        return ()
    return soft if g.chance(0.7) else soft[:1]


def _asked(g: Builder) -> tuple[Argument, ...]:
    """The arguments, some with specs, some placed before the call, occasionally one donated."""
    found = []
    for a in g.arguments:
        way, spec, placed = g.rng.random(), None, None
        if a.value in g.given:
            spec = g.given[a.value]
        elif a.type.place == "static":
            pass
        elif way < 0.5 and a.type.place != "ref":
            spec = g.spec(a.type.shape, divides=True)
            spec = closed(spec) if a.type.place == "pinned_host" else spec
        elif way < 0.65:
            placed = closed(g.spec(a.type.shape, divides=True, open_dims=0.0))
        donated = g.chance(0.1) and a.type.place == "device"
        found.append(Argument(value=a.value, type=a.type, spec=spec, placed=placed, donated=donated))
    return tuple(found)


def closed(spec: SpecData) -> SpecData:
    """A spec that an array can be placed with."""
    return tuple(tuple(a for a in e if a != "...") if isinstance(e, tuple) else None if e == "?" else e for e in spec)


def numbered(seed: int, number: int) -> Case:
    """Case `number` of a seed, the same on every machine."""
    return generate(random.Random(f"{seed}/{number}"))


cases = st.randoms(use_true_random=False).map(generate)
"""Hypothesis strategy of random cases."""
