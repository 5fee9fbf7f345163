"""Minimises a failing case: removes results, ops, specs and mesh axes while it fails in the same way.

An op is removed by turning its results into arguments or replacing them with an operand; unused ops go with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from .case import Argument, Block, Case, Entry, Record, SpecData

Fails = Callable[[Case], bool]


def shrink(case: Case, fails: Fails, *, tries: int = 400) -> Case:
    """The smallest failing case found, after a limited number of tries."""
    left = tries
    progress = True
    while progress and left > 0:
        progress = False
        for make in (_fewer_results, _fewer_records, _passed_on, _simpler_calls, _simpler_specs, _smaller_mesh):
            again = True
            while again and left > 0:
                again = False
                for smaller in make(case):
                    left -= 1
                    smaller = pruned(smaller)
                    if smaller != case and fails(smaller):
                        case, progress, again = smaller, True, True
                        break
                    if left <= 0:
                        break
    return case


def pruned(case: Case) -> Case:
    """The case without unused records and arguments."""
    needed = set(case.results)
    records = _needed(case.records, needed)
    kept = [i for i, a in enumerate(case.arguments) if a.value in needed or i in case.by]
    by = tuple(kept.index(i) for i in case.by)
    arguments = tuple(case.arguments[i] for i in kept)
    keywords = sum(i >= len(case.arguments) - case.keywords for i in kept)
    return dataclasses.replace(case, records=records, arguments=arguments, by=by, keywords=keywords)


def _needed(records: tuple[Record, ...], needed: set[int]) -> tuple[Record, ...]:
    found: list[Record] = []
    for record in reversed(records):
        if not needed.intersection(record.results):
            continue
        bodies = []
        for body in record.bodies:
            needed.update(body.results)
            bodies.append(dataclasses.replace(body, records=_needed(body.records, needed)))
        needed.update(record.operands)
        found.append(dataclasses.replace(record, bodies=tuple(bodies)))
    return tuple(reversed(found))


def _fewer_results(case: Case) -> Iterator[Case]:
    if case.by:
        yield _without_gradients(case)
        for k in range(len(case.by)):
            yield _with_gradient(case, k)
    n = len(case.results)
    if n > 1:
        for i in range(n):
            yield _with_results(case, [i])
        for i in range(n):
            yield _with_results(case, [k for k in range(n) if k != i])


def _without_gradients(case: Case) -> Case:
    n = len(case.results)
    outs = case.out_specs[:n] if case.out_specs is not None else None
    kinds = case.out_kinds[:n]
    return dataclasses.replace(case, by=(), counted=(), exact=case.exact[:n], out_specs=outs, out_kinds=kinds)


def _with_gradient(case: Case, k: int) -> Case:
    n = len(case.results)
    outs = (*case.out_specs[:n], case.out_specs[n + k]) if case.out_specs is not None else None
    kinds = (*case.out_kinds[:n], case.out_kinds[n + k]) if case.out_kinds else ()
    exact = (*case.exact[:n], False)
    return dataclasses.replace(case, by=(case.by[k],), exact=exact, out_specs=outs, out_kinds=kinds)


def _with_results(case: Case, kept: list[int]) -> Case:
    n = len(case.results)
    counted = tuple(kept.index(i) for i in case.counted if i in kept)
    if case.by and not counted:
        case, counted = _without_gradients(case), ()
    places = [*kept, *range(n, n + len(case.by))]
    outs = tuple(case.out_specs[i] for i in places) if case.out_specs is not None else None
    return dataclasses.replace(
        case,
        results=tuple(case.results[i] for i in kept),
        exact=tuple(case.exact[i] for i in places),
        counted=counted,
        out_specs=outs,
        out_kinds=tuple(case.out_kinds[i] for i in places) if case.out_kinds else (),
    )


def _paths(records: tuple[Record, ...], at: tuple = ()) -> Iterator[tuple[tuple, Record]]:
    for i, record in enumerate(records):
        yield (*at, i), record
        for k, body in enumerate(record.bodies):
            yield from _paths(body.records, (*at, i, k))


def _edited(records: tuple[Record, ...], path: tuple, edit: Callable[[Record], Record | None]) -> tuple[Record, ...]:
    """The records with the one at a path replaced or removed."""
    i, *rest = path
    record = records[i]
    if rest:
        k, *inner = rest
        body = record.bodies[k]
        changed = dataclasses.replace(body, records=_edited(body.records, tuple(inner), edit))
        new = dataclasses.replace(record, bodies=(*record.bodies[:k], changed, *record.bodies[k + 1 :]))
    else:
        new = edit(record)
    return (*records[:i], *([] if new is None else [new]), *records[i + 1 :])


def _fewer_records(case: Case) -> Iterator[Case]:
    n, size = len(case.records), len(case.records) // 2
    while size > 1:  # consecutive records first
        for start in range(0, n, size):
            yield _replaced(case, case.records[start : start + size], [])
        size //= 2
    for path, record in reversed(list(_paths(case.records))):
        yield _replaced(case, [record], [path])


def _replaced(case: Case, gone, paths) -> Case:
    """Turns the results of records into arguments of the program."""
    made = [Argument(value=r, type=t) for record in gone for r, t in zip(record.results, record.types, strict=True)]
    if paths:
        records = _edited(case.records, paths[0], lambda _: None)
    else:
        records = tuple(r for r in case.records if r not in gone)
    return dataclasses.replace(case, records=records, arguments=(*case.arguments, *made), keywords=0)


def _passed_on(case: Case) -> Iterator[Case]:
    types = {a.value: a.type for a in case.arguments}
    for _, record in _paths(case.records):
        types.update(zip(record.results, record.types, strict=True))
    for path, record in _paths(case.records):
        for operand in record.operands:
            if types.get(operand) == record.types[0] and len(record.results) == 1:
                records = _edited(case.records, path, lambda _: None)
                yield _renamed(dataclasses.replace(case, records=records), record.results[0], operand)


def _renamed(case: Case, old: int, new: int) -> Case:
    def values(vs: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(new if v == old else v for v in vs)

    def block(b: Block) -> Block:
        return dataclasses.replace(b, records=tuple(map(record, b.records)), results=values(b.results))

    def record(r: Record) -> Record:
        return dataclasses.replace(r, operands=values(r.operands), bodies=tuple(map(block, r.bodies)))

    results = values(case.results)
    return dataclasses.replace(case, records=tuple(map(record, case.records)), results=results)


def _simpler_calls(case: Case) -> Iterator[Case]:
    for plain in (
        {"keywords": 0},
        {"engine": "sharding"},
        {"policy": "storage"},
        {"explicit": False},
        {"out_kinds": ()},
    ):
        yield dataclasses.replace(case, **plain)
    if case.out_specs is not None:
        yield dataclasses.replace(case, out_specs=None)
        for i, spec in enumerate(case.out_specs):
            for s in [None, *_simpler(spec)] if spec is not None else []:
                outs = (*case.out_specs[:i], s, *case.out_specs[i + 1 :])
                yield dataclasses.replace(case, out_specs=outs)
    for i, a in enumerate(case.arguments):
        changes = [{"donated": False}] if a.donated else []
        changes += [{"placed": None}] if a.placed is not None else []
        changes += [{"spec": s} for s in ([None, *_simpler(a.spec)] if a.spec is not None else [])]
        for change in changes:
            new = dataclasses.replace(a, **change)
            yield dataclasses.replace(case, arguments=(*case.arguments[:i], new, *case.arguments[i + 1 :]))


def _simpler(spec: SpecData) -> Iterator[SpecData]:
    """Variants of a spec with one entry less."""
    if spec and spec[-1] is None:
        yield spec[:-1]
    for d, entry in enumerate(spec):
        options = [] if entry is None else [None] if not isinstance(entry, tuple) else [None, *entry]
        for e in options:
            if e != "...":
                yield (*spec[:d], e, *spec[d + 1 :])


def _simpler_specs(case: Case) -> Iterator[Case]:
    for path, record in _paths(case.records):
        for spec in _simpler(record.spec) if record.spec is not None else ():

            def edit(r: Record, spec: SpecData = spec) -> Record:
                return dataclasses.replace(r, spec=spec)

            yield dataclasses.replace(case, records=_edited(case.records, path, edit))


def _smaller_mesh(case: Case) -> Iterator[Case]:
    for axis, _ in case.mesh:
        if len(case.mesh) > 1:
            yield _without_axis(case, axis)


def _without_axis(case: Case, axis: str) -> Case:
    def spec(s: SpecData | None) -> SpecData | None:
        if s is None:
            return None
        return tuple(entry(e) for e in s)

    def entry(e: Entry) -> Entry:
        if isinstance(e, tuple):
            return tuple(a for a in e if a != axis) or None
        return None if e == axis else e

    def record(r: Record) -> Record:
        bodies = tuple(dataclasses.replace(b, records=tuple(map(record, b.records))) for b in r.bodies)
        return dataclasses.replace(r, spec=spec(r.spec), bodies=bodies)

    return dataclasses.replace(
        case,
        mesh=tuple(m for m in case.mesh if m[0] != axis),
        arguments=tuple(dataclasses.replace(a, spec=spec(a.spec), placed=spec(a.placed)) for a in case.arguments),
        records=tuple(map(record, case.records)),
        out_specs=None if case.out_specs is None else tuple(map(spec, case.out_specs)),
    )
