"""The engine against a slow propagation, and its conflicts and classes against enumerations, on random graphs."""

import math
import random

import pytest
from support import slow_propagation
from support.random_graphs import MESHES, annotate, random_graph

from sharding.errors import ShardingError
from sharding.graph import group_annotations
from sharding.propagation import complete
from sharding.propagation.dim_classes import DimClasses
from sharding.rules import Kind
from sharding.spec import num_parts


def completed_graphs(seeds):
    """Yields (seed, mesh, annotations by value, completion), without graphs whose groups are annotated differently."""
    for seed in seeds:
        rng = random.Random(seed)
        mesh = rng.choice(MESHES)
        graph = random_graph(rng)
        annotate(rng, graph, mesh)
        try:
            annotations = group_annotations(graph)
        except ShardingError:
            continue
        yield seed, mesh, annotations, complete(graph, mesh)


def names_of(axes, mesh):
    """Specs as parts of axes."""
    sizes = slow_propagation.parts_of(mesh)
    return [[tuple(slow_propagation.parts(dim, sizes)) for dim in spec] for spec in axes]


@pytest.mark.parametrize("first", range(0, 1200, 300))
def test_random_graphs(first):
    sharded = conflicts = 0
    for seed, mesh, annotations, found in completed_graphs(range(first, first + 300)):
        graph = found.graph
        got = names_of([spec.axes for spec in found.specs], mesh)
        expected = slow_propagation.propagated(graph, mesh, annotations)
        text = "\n".join(f"{op.name} {op.operands} -> {op.results}: {op.rule} {op.rule.flow}" for op in graph.ops)
        assert got == expected, f"seed {seed}\n{text}"
        sharded += sum(any(spec) for spec in got) > len(graph.annotations)
        conflicts += bool(found.conflicts)
    assert sharded > 120 and conflicts > 60


def expected_conflicts(mesh, annotations, found):
    """(value, the longest claim's value, dim and axes) of every array that lacks axes of a factor, each once."""
    slow = slow_propagation.Slow(found.graph, mesh, annotations)
    slow.axes = [[list(dim) for dim in spec] for spec in names_of([spec.axes for spec in found.specs], mesh)]
    seen = {}
    for i, op in enumerate(slow.ops):
        rule, arrays = op.rule, slow.arrays(i)
        shapes = (*rule.operands, *rule.results)
        own = [slow.factors(v, dims, rule.sizes)[0] for v, dims in zip(arrays, shapes, strict=True)]
        for f, kind in enumerate(rule.kinds):
            holders = [a for a, factors in enumerate(own) if f in factors]
            if kind is Kind.REPLICATE or f in rule.blocked or not holders:
                continue
            longest = max(holders, key=lambda a: (len(own[a][f]), -a))
            at = [next(d for d, dim in enumerate(dims) if f in dim) if f in factors else None
                  for factors, dims in zip(own, shapes, strict=True)]  # fmt: skip
            want = own[longest][f]
            if not slow.axes[arrays[longest]][at[longest]]:
                continue
            for a in holders:
                if own[a][f] != want:
                    value, other = ((*op.operands, *op.results)[k] for k in (a, longest))
                    seen.setdefault((value, at[a], tuple(want)), (own[a][f], other, at[longest]))
    return seen


@pytest.mark.parametrize("first", range(2000, 2400, 200))
def test_conflicts_are_the_arrays_that_lack_axes_of_a_factor(first):
    """With who won, why, and the bytes that it costs."""
    rules = set()
    for seed, mesh, annotations, found in completed_graphs(range(first, first + 200)):
        graph, parts = found.graph, slow_propagation.parts_of(mesh)
        expected = expected_conflicts(mesh, annotations, found)
        assert len(found.conflicts) == len(expected), seed
        for (value, dim, want), (have, other, other_dim), got in zip(
            expected.keys(), expected.values(), found.conflicts, strict=True
        ):
            claim = tuple(slow_propagation.parts(got.lost.axes, parts))
            assert (got.kept.value, got.lost.value, got.lost.dim, claim) == (value, other, other_dim, want), seed
            missing = next(part for k, part in enumerate(want) if k >= len(have) or have[k] != part)
            spec = names_of([found.specs[value].axes], mesh)[0]
            elsewhere = [d for d, axes in enumerate(spec) if missing in axes]
            assert got.kept.dim == (elsewhere[0] if elsewhere else dim)
            assert got.kept.axes == found.specs[value].dims[got.kept.dim].axes
            if any(d != dim for d in elsewhere):
                assert got.rule == "the axis already shards another dim"
            elif have and list(have) != list(want)[: len(have)]:
                assert got.rule == "the dim is already sharded over other axes"
            rules.add(got.rule)
            now = graph.num_bytes(value) // math.prod(num_parts(axes, mesh) for axes in found.specs[value].axes)
            gain = math.prod(parts[p] for p in want) // math.prod(parts[p] for p in have)
            assert got.bytes_lost == now - now // max(1, gain)
    assert len(rules) == 5


@pytest.mark.parametrize("first", range(3000, 3200, 100))
def test_every_axis_has_come_from_an_annotation_through_ops_that_tie_its_dims(first):
    long = 0
    for seed, mesh, _, found in completed_graphs(range(first, first + 100)):
        graph, parts = found.graph, slow_propagation.parts_of(mesh)
        for v, spec in enumerate(found.specs):
            for d, dim in enumerate(spec.dims):
                for axis in dim.axes:
                    steps = found.chain(v, d, axis)
                    assert steps[0][:2] == (v, d), seed
                    last, last_dim, reason = steps[-1]
                    assert reason.word == "annotated" and reason.origin == graph.annotations[last].origin
                    asked = slow_propagation.parts(graph.annotations[last].spec.dims[last_dim].axes, parts)
                    assert {*asked} & {*slow_propagation.parts([axis], parts)}
                    for (u, e, why), (w, g, _) in zip(steps, steps[1:], strict=False):
                        assert (why.value, why.dim) == (w, g)
                        is_same = why.word == "same group" and w in graph.members(u)
                        assert is_same or any(tied(op, (u, e), (w, g)) for op in graph.ops), seed
                    long += len(steps) > 3
    assert long > 20


def tied(op, one, other):
    """Whether two dims have a common factor in an op."""
    arrays = [*zip((*op.operands, *op.results), (*op.rule.operands, *op.rule.results), strict=True)]
    factors = [{f for v, dims in arrays if v == value for f in dims[d]} for value, d in (one, other)]
    return all(any(v == value for v, _ in arrays) for value, _ in (one, other)) and bool(factors[0] & factors[1])


def test_classes_are_the_dims_that_ops_tie_directly_or_not():
    for seed in range(4000, 4060):
        graph = random_graph(random.Random(seed))
        at = [(v, d) for v, shape in enumerate(graph.shapes) for d in range(len(shape))]
        ties = []
        for op in graph.ops:
            rule, values = op.rule, (*op.operands, *op.results)
            majors = [
                ((v, d), next((f for f in factors if rule.sizes[f] > 1), factors[0]))
                for v, dims in zip(values, (*rule.operands, *rule.results), strict=True)
                for d, factors in enumerate(dims)
            ]
            ties += [(x, y) for x, f in majors for y, g in majors if f == g]
        members = [(u, w) for group in graph.groups for u in group.members for w in group.members]
        ties += [((u, d), (w, d)) for u, w in members for d in range(len(graph.shapes[u]))]
        number = {x: k for k, x in enumerate(at)}
        changed = True
        while changed:
            changed = False
            for x, y in ties:
                if number[x] != number[y]:
                    number[x] = number[y] = min(number[x], number[y])
                    changed = True
        classes = DimClasses(graph)
        found = [classes.of(x) for x in at]
        assert len({*found}) == len({*number.values()}) == len({(f, number[x]) for f, x in zip(found, at, strict=True)})
        for v, shape in enumerate(graph.shapes):
            assert classes.form(v) == tuple((n, classes.of((v, d))) for d, n in enumerate(shape))
