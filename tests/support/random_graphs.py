"""Random graphs of ops with random factor rules, beyond those of programs: several factors per dim, loops, groups."""

import math

import jax
import jax.numpy as jnp

from sharding.graph import Annotation, Graph, Group, Op
from sharding.rules import Flow, Kind, Rule, identity
from sharding.spec import Dim, Spec

MESHES = ({"a": 2, "b": 2, "c": 2}, {"a": 4, "b": 2}, {"a": 6, "b": 2}, {"a": 8, "one": 1})
SITE = tuple(jax.make_jaxpr(jnp.sin)(1.0).eqns)
FACTOR_SIZES = (1, 2, 2, 4, 4, 6, 8, 3)
FLOWS = [*Flow, Flow.ELEMENTWISE, Flow.MOVE, Flow.OTHER]


def split(rng, factors):
    """Some factors as dims of one or more, in a random order."""
    left, dims = rng.sample(factors, len(factors)), []
    while left:
        count = min(len(left), rng.choice([1, 1, 1, 2, 3]))
        dims.append(tuple(left[:count]))
        left = left[count:]
    return tuple(dims)


def shape_of(dims, sizes):
    return tuple(math.prod(sizes[f] for f in dim) for dim in dims)


def fitting(rng, shapes, shape):
    """An earlier value of a shape, or a new one."""
    known = [v for v, one in enumerate(shapes) if one == shape]
    if known and rng.random() < 0.8:
        return rng.choice(known)
    shapes.append(shape)
    return len(shapes) - 1


def pointwise_rule(rng, shape):
    dims = tuple((d,) for d in range(len(shape)))
    count = rng.choice([1, 1, 2])
    return Rule(operands=(dims,) * count, results=(dims,), sizes=shape, kinds=(Kind.PASS,) * len(shape),
                flow=rng.choice([Flow.ELEMENTWISE, Flow.MOVE]))  # fmt: skip


def random_rule(rng, shape):
    """A rule whose first operand has a shape, or part of one."""
    if shape is not None and rng.random() < 0.5:
        return pointwise_rule(rng, shape)
    sizes = tuple(rng.choice(FACTOR_SIZES) for _ in range(rng.randint(2, 5)))
    if shape is not None:  # each dim is a factor, or two
        sizes, first = [], []
        for n in shape:
            k = rng.choice([k for k in (1, 2, 3, 4) if n % k == 0])
            whole = k == 1 or rng.random() < 0.5
            first.append((len(sizes),) if whole else (len(sizes), len(sizes) + 1))
            sizes += [n] if whole else [k, n // k]
        operands = [tuple(first)]
        sizes = (*sizes, rng.choice(FACTOR_SIZES))
    else:
        operands = [split(rng, [*range(len(sizes))])]
    factors = [*range(len(sizes))]
    for _ in range(rng.choice([0, 1])):
        operands.append(split(rng, rng.sample(factors, rng.randint(1, len(factors)))))
    rng.shuffle(operands)
    results = [split(rng, rng.sample(factors, rng.randint(1, len(factors)))) for _ in range(rng.choice([1, 1, 2]))]
    kinds = tuple(rng.choice([Kind.PASS, Kind.PASS, *Kind]) for _ in factors)
    blocked = frozenset(f for f in factors if rng.random() < 0.1)
    return Rule(operands=tuple(operands), results=tuple(results), sizes=tuple(sizes), kinds=kinds, blocked=blocked,
                flow=rng.choice(FLOWS))  # fmt: skip


IJ, JI = ((0,), (1,)), ((1,), (0,))
SQUARE = [
    *[(operands, flow) for operands in ([IJ], [IJ, IJ], [IJ, IJ]) for flow in (Flow.ELEMENTWISE, Flow.MOVE)],
    ([JI], Flow.MOVE),
    ([((0,), (2,)), ((2,), (1,))], Flow.OTHER),
    ([IJ], Flow.BROADCAST),
    ([IJ, JI], Flow.ELEMENTWISE),
]


def square_graph(rng):
    """A graph of square matrices alone, which are used often: where there are many ways, their order decides."""
    n, ops = rng.choice([4, 8]), []
    num_values = first = rng.randint(2, 4)
    for _ in range(rng.randint(4, 14)):
        operands, flow = rng.choice(SQUARE)
        count = 3 if flow is Flow.OTHER else 2
        kinds = (Kind.PASS, Kind.PASS, Kind.REDUCE)[:count]
        rule = Rule(operands=tuple(operands), results=(IJ,), sizes=(n,) * count, kinds=kinds, flow=flow)
        ops.append(Op("op", tuple(rng.choices(range(num_values), k=len(operands))), (num_values,), rule, (), 1, ()))
        num_values += 1
    for u in range(first if rng.random() < 0.3 else 0):  # loops
        ops.append(Op("edge", (rng.randrange(first, num_values),), (u,), identity(1, (n, n)), SITE, 1, ()))
    graph = Graph(shapes=[(n, n)] * num_values, dtypes=[jnp.float32] * num_values, sites=[()] * num_values, ops=ops)
    for _ in range(rng.choice([0, 0, 1, 2])):
        graph.groups.append(Group(tuple(rng.sample(range(num_values), 2)), ()))
    return graph


def random_graph(rng):
    """A graph of random rules, or of square matrices."""
    if rng.random() < 0.5:
        return square_graph(rng)
    shapes, ops, made = [], [], set()
    for _ in range(rng.randint(2, 9)):
        rule = random_rule(rng, rng.choice(shapes) if shapes and rng.random() < 0.8 else None)
        operands = tuple(fitting(rng, shapes, shape_of(dims, rule.sizes)) for dims in rule.operands)
        results = []
        for dims in rule.results:
            shape = shape_of(dims, rule.sizes)
            open_ends = [v for v, one in enumerate(shapes) if one == shape and v not in made and v not in operands]
            if open_ends and rng.random() < 0.1:  # a loop: an argument that is given later
                results.append(rng.choice(open_ends))
            else:
                shapes.append(shape)
                results.append(len(shapes) - 1)
            made.add(results[-1])
        is_pointwise = rule.flow is Flow.MOVE and len(set(rule.operands + rule.results)) == 1
        name = rng.choice(["edge", "copy"]) if is_pointwise else "op"
        site = SITE if name == "edge" and rng.random() < 0.7 else ()
        ops.append(Op(name, operands, tuple(results), rule, site, 1, ()))
    arguments = [u for u in range(len(shapes)) if u not in made]
    loops = [(v, u) for u in arguments for v in made if v > u and shapes[u] == shapes[v]]
    for v, u in rng.sample(loops, min(len(loops), rng.choice([0, 1, 2]))):  # what a loop carries
        if u not in made:
            ops.append(Op("edge", (v,), (u,), identity(1, shapes[v]), SITE, 1, ()))
            made.add(u)
    graph = Graph(shapes=shapes, dtypes=[jnp.float32] * len(shapes), sites=[()] * len(shapes), ops=ops)
    alike = [(u, v) for u in range(len(shapes)) for v in range(u) if shapes[u] == shapes[v]]
    if alike and rng.random() < 0.3:
        graph.groups.append(Group(rng.choice(alike), ()))
    return graph


def annotate(rng, graph, mesh):
    for v in rng.sample(range(len(graph.shapes)), min(len(graph.shapes), rng.randint(1, 5))):
        free = [axis for axis, size in mesh.items() if size > 1]
        rng.shuffle(free)
        dims = []
        for _ in graph.shapes[v]:
            count = rng.choice([0, 0, 1, 1, 2])
            axes, free = tuple(free[:count]), free[count:]
            if axes and mesh[axes[0]] in (4, 8) and rng.random() < 0.3:
                axes = ((axes[0], rng.choice([1, 2]), 2),)
            dims.append(Dim(axes=axes, open=rng.random() < 0.6, priority=rng.choice([0, 0, 0, 1, 2])))
        graph.annotations[v] = Annotation(spec=Spec(dims=tuple(dims)), origin=f"of {v}")
    for v in range(len(graph.shapes)):
        if rng.random() < 0.05 and v not in graph.annotations:
            graph.manual[v] = frozenset({"a"})
