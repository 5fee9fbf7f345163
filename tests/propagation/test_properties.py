"""Properties of propagation on random programs with random annotations.

Without conflicting claims (`has_conflicts`) propagation finds the least completion, whatever the order of equations and
whichever inferred specs are annotated. With conflicts, priorities, sizes and finally program order decide; another
order may then give another completion.
"""

import dataclasses
import functools
import random
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest
from fuzz.check import completed
from fuzz.generate import numbered

import sharding
from sharding import P
from sharding.graph import Annotation, Graph, Op, joined
from sharding.propagation import Assignment, complete
from sharding.propagation.axis_atoms import AtomTable
from sharding.propagation.fixed_point import Engine
from sharding.rules import Kind
from sharding.spec import Dim, Spec

QUICK, SLOW = 24, 400
BATCHES = [
    pytest.param(range(QUICK), id="quick"),
    *(pytest.param(range(n, n + 50), id=str(n), marks=pytest.mark.slow) for n in range(QUICK, SLOW, 50)),
]
each_batch = pytest.mark.parametrize("numbers", BATCHES)

Sizes = dict[str, int]


@functools.cache
def program(number: int) -> tuple[Graph, Sizes] | None:
    """None for a program that plain JAX rejects, as a gradient through a callback that is recomputed."""
    try:
        found = completed(numbered("laws", number)).assignment
    except NotImplementedError:
        return None
    return found.graph, dict(found.sizes)


def programs(numbers: range) -> Iterator[tuple[Graph, Sizes, random.Random]]:
    """Yields each program with its own annotations, then with random ones."""
    found = {number: program(number) for number in numbers}
    assert sum(one is None for one in found.values()) <= len(numbers) // 10
    for number, one in found.items():
        if one is None:
            continue
        graph, sizes = one
        rng = random.Random(number)
        yield graph, sizes, rng
        for count in (1, 2, 3):
            yield (
                annotated(dataclasses.replace(graph, annotations={}, annotation_conflicts=[]), sizes, rng, count),
                sizes,
                rng,
            )


def annotated(graph: Graph, sizes: Sizes, rng: random.Random, count: int) -> Graph:
    values = rng.sample(range(len(graph.shapes)), min(count, len(graph.shapes)))
    return graph.with_annotations({v: annotation(graph, v, sizes, rng) for v in values if v not in graph.annotations})


def annotation(graph: Graph, value: int, sizes: Sizes, rng: random.Random) -> Annotation:
    """Returns a random annotation with open and closed dims, several axes on a dim, sub-axes and priorities."""
    free = [axis for axis, size in sizes.items() if size > 1]
    rng.shuffle(free)
    dims = []
    for _ in graph.shapes[value]:
        count = rng.choice([0, 0, 1, 1, 2])
        axes, free = tuple(free[:count]), free[count:]
        if axes and sizes[axes[0]] == 4 and rng.random() < 0.3:
            axes = ((axes[0], 1, 2),)
        dims.append(Dim(axes=axes, open=rng.random() < 0.5, priority=rng.choice([0, 0, 0, 1, 2])))
    return Annotation(spec=Spec(dims=tuple(dims)), origin=f"random {rng.random()}")


def axes_of(a: Assignment) -> list:
    return [spec.axes for spec in a.specs]


def contains(more: Assignment, less: Assignment) -> bool:
    """Whether the axes of every dim extend those in `less`."""
    atoms = AtomTable.of(less.sizes)
    pairs = [(x, y) for s, t in zip(less.specs, more.specs, strict=True) for x, y in zip(s.axes, t.axes, strict=True)]
    return all(atoms.atoms_of(y)[: len(atoms.atoms_of(x))] == atoms.atoms_of(x) for x, y in pairs)


def has_conflicts(a: Assignment) -> bool:
    """Whether the arrays of some op conflict, including on factors that the op replicates anyway."""
    replicated = [(op, f) for op in a.graph.ops if op.rule for f, k in enumerate(op.rule.kinds) if k is Kind.REPLICATE]
    return bool(a.conflicts) or any(len(set(factor_axes(a, op, f))) > 1 for op, f in replicated)


def factor_axes(a: Assignment, op: Op, factor: int) -> Iterator[tuple]:
    """Yields the axes of each dim of an op that has a factor."""
    arrays = zip((*op.operands, *op.results), (*op.rule.operands, *op.rule.results), strict=True)
    return (a.specs[v].axes[d] for v, dims in arrays for d, factors in enumerate(dims) if factor in factors)


@each_batch
def test_annotations_are_kept(numbers):
    for graph, sizes, _ in programs(numbers):
        a, atoms = complete(graph, sizes), AtomTable.of(sizes)
        for v, annotation in graph.annotations.items():
            for asked, got in zip(annotation.spec.dims, a.specs[v].dims, strict=True):
                required, found = atoms.atoms_of(asked.axes), atoms.atoms_of(got.axes)
                assert (found[: len(required)] if asked.open else found) == required


@each_batch
def test_completion_is_idempotent(numbers):
    """With every spec as an annotation, open where it was open before, nothing changes."""
    for graph, sizes, _ in programs(numbers):
        a = complete(graph, sizes)
        annotations = {}
        for v, spec in enumerate(a.specs):
            was = graph.annotations[v].spec.dims if v in graph.annotations else (Dim(open=True),) * len(spec.dims)
            dims = [Dim(axes=d.axes, open=w.open) for d, w in zip(spec.dims, was, strict=True)]
            annotations[v] = Annotation(spec=Spec(dims=tuple(dims)), origin="completed")
        assert axes_of(complete(graph.with_annotations(annotations), sizes)) == axes_of(a)


@each_batch
def test_without_conflicts_annotating_an_inferred_spec_changes_nothing(numbers):
    checked = 0
    for graph, sizes, rng in programs(numbers):
        a = complete(graph, sizes)
        inferred = [v for v, spec in enumerate(a.specs) if any(spec.axes) and v not in graph.annotations]
        if inferred and not has_conflicts(a):
            v = rng.choice(inferred)
            dims = tuple(Dim(axes=d.axes, open=True) for d in a.specs[v].dims)
            more = complete(graph.with_annotations({v: Annotation(spec=Spec(dims=dims), origin="implied")}), sizes)
            assert axes_of(more) == axes_of(a)
            checked += 1
    assert checked > len(numbers) / 2


@each_batch
def test_without_conflicts_more_annotations_only_add_axes(numbers):
    """The axes of every dim extend those before."""
    added = 0
    for graph, sizes, rng in programs(numbers):
        a, more = complete(graph, sizes), complete(annotated(graph, sizes, rng, 1), sizes)
        if not has_conflicts(more):
            assert contains(more, a)
            added += axes_of(more) != axes_of(a)
    assert added > len(numbers) / 4


@each_batch
def test_without_conflicts_the_order_of_equations_does_not_matter(numbers):
    free = 0
    for graph, sizes, rng in programs(numbers):
        a = complete(graph, sizes)
        other = complete(dataclasses.replace(graph, ops=rng.sample(graph.ops, len(graph.ops))), sizes)
        if not has_conflicts(a):
            assert axes_of(other) == axes_of(a)
            free += any(any(axes) for axes in axes_of(a))
        assert has_conflicts(other) == has_conflicts(a)
    assert free > len(numbers)


# Further annotations of a completed program


def completed_or_error(complete, *args):
    try:
        return complete(*args)
    except sharding.ShardingError as e:
        return str(e)


@each_batch
def test_one_more_annotation_is_equivalent_to_completion_from_scratch(numbers):
    """Specs, reasons and conflicts, for several annotations in a row."""
    for graph, sizes, rng in programs(numbers):
        a = complete(graph, sizes)
        for _ in range(3):
            v = rng.randrange(len(graph.shapes))
            new = annotation(graph, v, sizes, rng)
            both = joined(a.graph.annotations[v], new) if v in a.graph.annotations else new
            if both is None:
                continue
            before, reasons = axes_of(a), dict(a.reasons)
            more = completed_or_error(a.with_annotations, {v: both})
            fresh = completed_or_error(complete, a.graph.with_annotations({v: both}), sizes)
            if isinstance(fresh, str):  # it conflicts with that of another member of a group
                assert more == fresh and (axes_of(a), a.reasons) == (before, reasons)
                continue
            assert more.specs == fresh.specs
            assert more.reasons == fresh.reasons
            assert more.conflicts == fresh.conflicts
            assert (axes_of(a), a.reasons) == (before, reasons)  # the first assignment is unchanged
            a = more


def test_annotating_an_argument_is_equivalent_to_in_shardings():
    def f(x, w):
        return sharding.annotate(jnp.tanh(x @ w), name="hidden") @ w.T

    shapes = [jax.ShapeDtypeStruct((8, 8), jnp.float32)] * 2
    with sharding.mesh(data=2, tensor=4, devices=8):
        bare = sharding.jit(f).complete(*shapes)
        asked = sharding.jit(f, in_shardings=(P("data"), P(P.UNCONSTRAINED, "tensor"))).complete(*shapes)
        more = bare.annotate("x", P("data")).annotate("w", P(P.UNCONSTRAINED, "tensor"))
    assert more.assignment.specs == asked.assignment.specs
    assert more.spec("hidden") == P("data", "tensor") and bare.spec("hidden") == P()


# Complexity


class Counted(Engine):
    """An engine that counts its visits."""

    visits = 0

    def visit(self, i):
        self.visits += 1
        return super().visit(i)


def cost(layers: int) -> tuple[int, int]:
    """Returns (visits, cached visits) for a stack of layers and its gradient."""

    def f(params, x):
        for w1, w2 in params:
            x = x + jnp.tanh(x @ w1) @ w2
        return jnp.sum(x**2)

    w = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    with sharding.mesh(data=2, tensor=4, devices=8) as mesh:
        step = sharding.jit(jax.grad(f), in_shardings=([(P(None, "tensor"), P("tensor"))] * layers, P("data")))
        graph = step.complete([(w, w)] * layers, w).assignment.graph
    engine = Counted(graph, AtomTable.of(mesh.shape))
    engine.run()
    return engine.visits, len(engine.visit_cache)


def test_visits_are_linear_in_the_layers_and_cached_visits_constant():
    (visits_8, cached_8), (visits_16, cached_16), (visits_32, cached_32) = map(cost, (8, 16, 32))
    assert visits_32 - visits_16 == 2 * (visits_16 - visits_8)
    assert cached_8 == cached_16 == cached_32


HASHED = """
    import jax
    import jax.numpy as jnp
    import sharding
    from sharding import P

    jax.config.update("jax_num_cpu_devices", 8)

    def step(state, x):
        def loss(w):
            h = sharding.annotate(jnp.tanh(x @ w["a"]), P("data", "tensor"), name="hidden", priority=1)
            return jnp.sum(jax.lax.scan(lambda c, r: (jnp.sin(c + r @ w["b"]), c), h[0], h)[1] ** 2)
        return jax.tree.map(lambda w, g: w - g, state, jax.grad(loss)(state))

    w = jnp.ones((8, 8))
    with sharding.mesh(data=2, tensor=4):
        f = sharding.jit(step, in_shardings=({"a": P(None, "tensor"), "b": None}, P("data")), donate_argnums=(0,))
        print(f.lower({"a": w, "b": w}, w).as_text(), f.complete({"a": w, "b": w}, w))
"""


def test_the_lowered_program_does_not_depend_on_hash_seeds():
    texts = []
    for seed in ("1", "2"):
        env = {"PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin"}
        run = [sys.executable, "-c", textwrap.dedent(HASHED)]
        texts.append(subprocess.run(run, env=env, capture_output=True, check=True).stdout)
    assert texts[0] == texts[1] and b"sharding_constraint" in texts[0]
