"""What holds of the pass on random programs with random annotations.

Where no two claims meet (`claims_meet`) the pass finds the least completion whatever the order of equations and
whatever of it is known beforehand. Where claims meet, priorities, sizes and at last the order of the program decide
between them; then another order may give another completion, with the same promises kept.
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
from sharding.graph import Graph, Op, Pin, joined
from sharding.propagation import Assignment, complete
from sharding.propagation.atoms import AtomTable
from sharding.propagation.engine import Engine
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
def program(number: int) -> tuple[Graph, Sizes]:
    found = completed(numbered("laws", number)).assignment
    return found.graph, dict(found.sizes)


def programs(numbers: range) -> Iterator[tuple[Graph, Sizes, random.Random]]:
    """Each program with its own annotations, then with random ones in their place."""
    for number in numbers:
        graph, sizes = program(number)
        rng = random.Random(number)
        yield graph, sizes, rng
        for count in (1, 2, 3):
            yield annotated(dataclasses.replace(graph, pins={}, clashes=[]), sizes, rng, count), sizes, rng


def annotated(graph: Graph, sizes: Sizes, rng: random.Random, count: int) -> Graph:
    values = rng.sample(range(len(graph.shapes)), min(count, len(graph.shapes)))
    return graph.with_pins({v: pin(graph, v, sizes, rng) for v in values if v not in graph.pins})


def pin(graph: Graph, value: int, sizes: Sizes, rng: random.Random) -> Pin:
    """Open and closed dims, several axes on a dim, parts of axes, priorities."""
    free = [axis for axis, size in sizes.items() if size > 1]
    rng.shuffle(free)
    dims = []
    for _ in graph.shapes[value]:
        count = rng.choice([0, 0, 1, 1, 2])
        axes, free = tuple(free[:count]), free[count:]
        if axes and sizes[axes[0]] == 4 and rng.random() < 0.3:
            axes = ((axes[0], 1, 2),)
        dims.append(Dim(axes=axes, open=rng.random() < 0.5, priority=rng.choice([0, 0, 0, 1, 2])))
    return Pin(spec=Spec(dims=tuple(dims)), origin=f"random {rng.random()}")


def axes_of(a: Assignment) -> list:
    return [spec.axes for spec in a.specs]


def contains(more: Assignment, less: Assignment) -> bool:
    """Whether every dim begins with what it has in `less`."""
    atoms = AtomTable.of(less.sizes)
    pairs = [(x, y) for s, t in zip(less.specs, more.specs, strict=True) for x, y in zip(s.axes, t.axes, strict=True)]
    return all(atoms.split(y)[: len(atoms.split(x))] == atoms.split(x) for x, y in pairs)


def claims_meet(a: Assignment) -> bool:
    """Whether the arrays of some op disagree: a conflict, or the same on a dim that the op needs whole anyway."""
    whole = [(op, f) for op in a.graph.ops if op.rule for f, k in enumerate(op.rule.kinds) if k is Kind.REPLICATE]
    return bool(a.conflicts) or any(len(set(splits(a, op, f))) > 1 for op, f in whole)


def splits(a: Assignment, op: Op, factor: int) -> Iterator[tuple]:
    """The axes of each dim of an op that has a factor."""
    arrays = zip((*op.operands, *op.results), (*op.rule.operands, *op.rule.results), strict=True)
    return (a.specs[v].axes[d] for v, dims in arrays for d, factors in enumerate(dims) if factor in factors)


@each_batch
def test_annotations_are_kept(numbers):
    for graph, sizes, _ in programs(numbers):
        a, atoms = complete(graph, sizes), AtomTable.of(sizes)
        for v, pin in graph.pins.items():
            for asked, got in zip(pin.spec.dims, a.specs[v].dims, strict=True):
                said, found = atoms.split(asked.axes), atoms.split(got.axes)
                assert (found[: len(said)] if asked.open else found) == said


@each_batch
def test_a_completion_completes_to_itself(numbers):
    """With every spec as an annotation, and each dim that was open before still free to grow, nothing grows."""
    for graph, sizes, _ in programs(numbers):
        a = complete(graph, sizes)
        pins = {}
        for v, spec in enumerate(a.specs):
            was = graph.pins[v].spec.dims if v in graph.pins else (Dim(open=True),) * len(spec.dims)
            dims = [Dim(axes=d.axes, open=w.open) for d, w in zip(spec.dims, was, strict=True)]
            pins[v] = Pin(spec=Spec(dims=tuple(dims)), origin="completed")
        assert axes_of(complete(graph.with_pins(pins), sizes)) == axes_of(a)


@each_batch
def test_where_no_claims_meet_what_is_implied_may_be_said(numbers):
    """An inferred spec as an annotation changes nothing."""
    said = 0
    for graph, sizes, rng in programs(numbers):
        a = complete(graph, sizes)
        inferred = [v for v, spec in enumerate(a.specs) if any(spec.axes) and v not in graph.pins]
        if inferred and not claims_meet(a):
            v = rng.choice(inferred)
            dims = tuple(Dim(axes=d.axes, open=True) for d in a.specs[v].dims)
            more = complete(graph.with_pins({v: Pin(spec=Spec(dims=dims), origin="implied")}), sizes)
            assert axes_of(more) == axes_of(a)
            said += 1
    assert said > len(numbers) / 2


@each_batch
def test_where_no_claims_meet_more_annotations_only_add_axes(numbers):
    """Every dim begins with what it had before, where with more annotations no claims meet."""
    added = 0
    for graph, sizes, rng in programs(numbers):
        a, more = complete(graph, sizes), complete(annotated(graph, sizes, rng, 1), sizes)
        if not claims_meet(more):
            assert contains(more, a)
            added += axes_of(more) != axes_of(a)
    assert added > len(numbers) / 4


@each_batch
def test_where_no_claims_meet_the_order_of_equations_makes_no_difference(numbers):
    free = 0
    for graph, sizes, rng in programs(numbers):
        a = complete(graph, sizes)
        other = complete(dataclasses.replace(graph, ops=rng.sample(graph.ops, len(graph.ops))), sizes)
        if not claims_meet(a):
            assert axes_of(other) == axes_of(a)
            free += any(any(axes) for axes in axes_of(a))
        assert claims_meet(other) == claims_meet(a)
    assert free > len(numbers)


# One more annotation on what is completed


def completed_or_refused(complete, *args):
    try:
        return complete(*args)
    except sharding.ShardingError as e:
        return str(e)


@each_batch
def test_one_more_annotation_gives_what_comes_from_scratch(numbers):
    """Several in a row; specs, reasons and conflicts."""
    for graph, sizes, rng in programs(numbers):
        a = complete(graph, sizes)
        for _ in range(3):
            v = rng.randrange(len(graph.shapes))
            new = pin(graph, v, sizes, rng)
            both = joined(a.graph.pins[v], new) if v in a.graph.pins else new
            if both is None:
                continue
            before, reasons = axes_of(a), dict(a.reasons)
            more = completed_or_refused(a.with_pins, {v: both})
            fresh = completed_or_refused(complete, a.graph.with_pins({v: both}), sizes)
            if isinstance(fresh, str):  # it contradicts that of another member of a group
                assert more == fresh and (axes_of(a), a.reasons) == (before, reasons)
                continue
            assert more.specs == fresh.specs
            assert more.reasons == fresh.reasons
            assert more.conflicts == fresh.conflicts
            assert (axes_of(a), a.reasons) == (before, reasons)  # the old one is as it was
            a = more


def test_an_annotation_on_an_argument_is_as_one_in_shardings():
    def f(x, w):
        return sharding.annotate(jnp.tanh(x @ w), name="hidden") @ w.T

    shapes = [jax.ShapeDtypeStruct((8, 8), jnp.float32)] * 2
    with sharding.mesh(data=2, tensor=4, devices=8):
        bare = sharding.jit(f).complete(*shapes)
        asked = sharding.jit(f, in_shardings=(P("data"), P(P.UNCONSTRAINED, "tensor"))).complete(*shapes)
        more = bare.annotate("x", P("data")).annotate("w", P(P.UNCONSTRAINED, "tensor"))
    assert more.assignment.specs == asked.assignment.specs
    assert more.spec("hidden") == P("data", "tensor") and bare.spec("hidden") == P()


# What it costs


class Counted(Engine):
    """The engine, counting its visits."""

    visits = 0

    def visit(self, i):
        self.visits += 1
        return super().visit(i)


def cost(layers: int) -> tuple[int, int]:
    """(visits, steps worked out) of a stack of layers with its gradient."""

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
    return engine.visits, len(engine.known)


def test_visits_grow_with_the_layers_and_steps_worked_out_do_not():
    (visits_8, steps_8), (visits_16, steps_16), (visits_32, steps_32) = map(cost, (8, 16, 32))
    assert visits_32 - visits_16 == 2 * (visits_16 - visits_8)
    assert steps_8 == steps_16 == steps_32


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
