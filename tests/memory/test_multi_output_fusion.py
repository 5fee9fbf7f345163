"""Kernels of XLA:GPU with several results."""

import random
import re

import jax
import jax.numpy as jnp
import pytest
from support import compilers
from support.device_ops import op, reduction
from support.peak_memory import floats

import sharding
from sharding.memory.compiler_traits import TRAITS
from sharding.memory.device_program import lower
from sharding.memory.fusion import Kernel, fuse
from sharding.memory.instruction import Instruction
from sharding.memory.kernel_cost import KernelCost
from sharding.memory.multi_output_fusion import Loop, fuse_outputs, is_custom, loop_of

X, Y = floats(1024, 1024), floats(1024, 1024)
ROW, FEW = floats(1024), floats(3)


def steps(few, *weights):
    """All weights read the same few numbers."""
    return [w * few[0] + few[1] * jnp.sin(w) for w in weights]


PROGRAMS = {
    "two readers": (lambda x: (jnp.sin(x) * 2, jnp.cos(x) + x), (X,), [2]),
    "single ops": (lambda x: (jnp.sin(x), jnp.cos(x)), (X,), []),
    "a single op with a kernel": (lambda x: (jnp.sin(x), jnp.cos(x) + x), (X,), [2]),
    "readers of a row": (lambda b, x, y: (jnp.sin(x) + b[None], jnp.cos(y) * b[None]), (ROW, X, Y), [2]),
    "readers of a few numbers": (steps, (FEW, X, Y, X), [3]),
    "other sizes": (lambda few, x, b: steps(few, x, b), (FEW, X, ROW), []),
    "one needs the other": (lambda x, w: ((y := jnp.sin(x) * 2) @ w, jnp.cos(x) + (y @ w)), (X, Y), []),
    "sums of rows": (lambda x: (jnp.sum(x * 3, 1), jnp.max(x * x, 1)), (X,), [2]),
    "sums of rows and columns": (lambda x: (jnp.sum(x * 3, 1), jnp.sum(x * x, 0)), (X,), []),
    "a kernel and a sum of what it makes": (lambda x, y: ((z := jnp.sin(x) * y) @ z, jnp.sum(z, 1)), (X, Y), [2]),
    "a kernel and a sum of its columns": (lambda x, y: ((z := jnp.sin(x) * y) @ z, jnp.sum(z, 0)), (X, Y), []),
    "a transpose and a kernel": (lambda x: ((x * 2).T, jnp.cos(x) + x), (X,), [2]),
    "readers of a product": (lambda x, y: ((z := x @ y) * 2, jnp.sin(z) - x), (X, Y), []),
    "what only they read": (lambda x: ((z := jnp.tanh(jnp.sort(x))) * 2, jnp.cos(z) - x), (X,), [2]),
}
"""A function, its arguments, and how many results the kernels of several have."""


def units_of(f, args):
    """The units of kernels of a function on one GPU."""
    with sharding.mesh({"data": 1}, devices=jax.devices()[:1]):
        program = lower(sharding.jit(f).complete(*args).assignment, TRAITS["gpu"])
    body = program.body
    return fuse_outputs(fuse(body.live_instructions(), body.results, TRAITS["gpu"]), body.results)


def compiled_counts(f, args):
    """The numbers of results of kernels with several, as compiled for an H100."""
    text = compilers.compiled_for_one(f, args, "h100:1x8").as_text()
    kernels = re.findall(r" = \((.*)\) fusion\(.*kind=k[^C]", text)
    return sorted(len(re.findall(r"\w\[", results)) for results in kernels)


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name):
    f, args, counts = PROGRAMS[name]
    assert sorted(len(unit) for unit in units_of(f, args) if len(unit) > 1) == counts


@pytest.mark.slow
@compilers.needs("jax_cuda13_plugin")
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_compiler_does_so(name):
    f, args, counts = PROGRAMS[name]
    assert compiled_counts(f, args) == counts


def random_program(seed):
    """Elementwise ops, sums and products of some arrays."""

    def f(x, y, b):
        draw = random.Random(seed)
        made, results = [x, y, jnp.sin(x) * b[None]], []
        for _ in range(draw.randint(6, 12)):
            one, other = draw.choice(made[-5:]), draw.choice(made)
            kind = draw.random()
            if kind < 0.6:
                made.append(draw.choice([jnp.add, jnp.multiply, jnp.arctan2])(jnp.tanh(one) * b[None], other))
            elif kind < 0.8:
                results.append(draw.choice([jnp.sum, jnp.max])(one * other, draw.choice([0, 1])))
            else:
                made.append(one @ other)
        return made[-2:], results

    return f, (X, Y, ROW)


@pytest.mark.slow
@compilers.needs("jax_cuda13_plugin")
@pytest.mark.parametrize("first", range(0, 24, 12))
def test_the_compiler_fuses_random_programs_so(first):
    """Most: what the kernels are before decides, too."""
    same = 0
    for seed in range(first, first + 12):
        f, args = random_program(seed)
        found = sorted(len(unit) for unit in units_of(f, args) if len(unit) > 1)
        same += found == compiled_counts(f, args)
    assert same >= 8


LARGE, SMALL = 2**20, 2**10


def kernel(name, *operands, elements=LARGE, is_alone=True):
    """Of one op, or of two."""
    facts = (elements,), 4 * elements
    inner = [] if is_alone else [Instruction("mul", "fusible", [k.root for k in operands], *facts, elementwise=True)]
    read = inner or [k.root for k in operands]
    one = Instruction(name, "fusible", read, *facts, elementwise=name in ("add", "mul"))
    return Kernel(one, [*inner, one], [k.root for k in operands])


def random_kernels(seed):
    draw = random.Random(seed)
    found = [kernel("x"), kernel("y")]
    for _ in range(24):
        facts = {"elements": draw.choice([LARGE, LARGE, SMALL]), "is_alone": draw.random() < 0.3}
        found.append(kernel(draw.choice(["add", "mul", "slice"]), *draw.sample(found[-6:], 2), **facts))
    return found


class Reference:
    """The same rules, over sets: what each unit needs is searched each time."""

    def __init__(self, kernels, results):
        self.units, self.results = [[k] for k in kernels], results
        self.kernels = kernels

    def unit(self, x):
        return next(u for u in self.units if any(k.root is x for k in u))

    def read_by(self, x):
        readers = [u for u in self.units if any(x in k.operands for k in u)]
        return sorted(readers, key=lambda u: min(self.kernels.index(k) for k in u if x in k.operands))

    def needed(self, unit):
        found, waiting = [], [unit]
        while waiting:
            for k in waiting.pop():
                for x in k.operands:
                    source = self.unit(x)
                    if not any(source is u for u in [*found, unit]):
                        found.append(source)
                        waiting.append(source)
        return found

    def needs(self, unit, other):
        return any(u is other for u in self.needed(unit))

    def rank(self, unit):
        return 2 if len(unit) > 1 else int(len(unit[0].members) > 1)

    def can_be(self, unit):
        return loop_of(unit[0]) is not None and (self.rank(unit) > 0 or unit[0].root.elementwise)

    def join(self, unit, other):
        unit += other
        self.units = [u for u in self.units if u is not other]

    def run(self):
        for k in reversed(self.kernels):
            siblings = sorted(filter(self.can_be, self.read_by(k.root)), key=self.rank, reverse=True)
            for at, u in enumerate(siblings):
                for v in siblings[at + 1 :]:
                    are_left = any(u is w for w in self.units) and any(v is w for w in self.units)
                    if not are_left or self.rank(u) == 0:
                        continue
                    is_free = not self.needs(u, v) and not self.needs(v, u)
                    if is_free and u[0].root.num_elements == v[0].root.num_elements:
                        self.join(u, v)
            self.with_reader(k)
        return self.units

    def with_reader(self, k):
        readers = self.read_by(k.root)
        if self.rank(self.unit(k.root)) == 2 or (
            len(readers) == 1 and k.root not in self.results and self.rank(readers[0]) < 2
        ):
            return
        for u in sorted(filter(self.can_be, readers), key=self.rank, reverse=True):
            others = [self.unit(x) for one in u for x in one.operands if x is not k.root]
            maker = self.unit(k.root)
            is_free = not any(self.needs(w, maker) for w in others if w is not u and w is not maker)
            if u[0].root.num_elements == k.root.num_elements and is_free:
                self.join(u, maker)
                return


@pytest.mark.parametrize("seed", range(40))
def test_random_kernels_are_fused_as_by_the_reference(seed):
    kernels = random_kernels(seed)
    results = [k.root for k in kernels[-6:]]
    found = fuse_outputs(kernels, results)
    expected = Reference(kernels, results).run()
    stored = {k.root for unit in found for k in unit}
    kept = [{k.root for k in unit} & stored for unit in expected]
    assert sorted(map(len, found)) == sorted(len(unit) for unit in kept if unit)
    assert {frozenset(k.root for k in unit) for unit in found} == {frozenset(unit) for unit in kept if unit}


@pytest.mark.parametrize("seed", range(40))
def test_units_follow_what_they_read_and_everything_is_computed(seed):
    kernels = random_kernels(seed)
    results = [k.root for k in kernels[-6:]]
    done, computed = set(), set()
    for unit in fuse_outputs(kernels, results):
        roots = {k.root for k in unit}
        assert all(done.union(roots).issuperset(k.operands) for k in unit)
        assert all(m.operands == [] or {*m.operands} <= {*k.operands, *k.members} for k in unit for m in k.members)
        done |= roots
        computed.update(m for k in unit for m in k.members)
    assert computed == {m for k in kernels for m in k.members}
    assert done.issuperset(results)


def summed(shape, *axes):
    one = reduction(op("x", shape=shape), *axes)
    return Kernel(one, [one], list(one.operands))


def test_loops():
    rows, columns = loop_of(summed((8, 128, 1024), 2)), loop_of(summed((1024, 1024), 0))
    assert rows == Loop(2**20, reduced=((1024, False), (1024, True)))
    assert rows == loop_of(summed((1024, 1024), 1))
    assert columns == Loop(2**20, reduced=((1024, True), (1024, False)))
    assert not rows.fits(columns)
    assert rows.fits(Loop(2**20)) and not rows.fits(Loop(2**10))
    assert loop_of(summed((2**20, 3), 1)) == Loop(2**20)  # a thread per row


def test_a_kernel_of_rows_is_not_fused():
    sums = summed((1024, 1024), 1)
    (x,) = sums.operands
    scaled = op("mul", x, sums.root, shape=x.shape, elementwise=True)
    both = Kernel(scaled, [sums.root, scaled], [x])
    assert is_custom(both) and loop_of(both) is None
    assert not is_custom(sums)


def test_storing_what_a_producer_makes_takes_longer():
    x = kernel("x").root
    one = op("mul", x, x, elementwise=True)
    two = op("add", one, x, elementwise=True)
    producer, consumer = KernelCost.of(one), KernelCost.of(two)
    assert consumer.us_with(producer) < consumer.us_with(producer, stores=True) < consumer.us + producer.us
