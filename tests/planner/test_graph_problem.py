"""The problem of a program: its costs are those of the collectives, its choices are shardings that run."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharding
from sharding import P, cost, planner
from sharding.cost.collective_time import collective_wire_bytes
from sharding.graph import Annotation
from sharding.planner import FORBIDDEN
from sharding.planner.graph_problem import MICRO
from sharding.planner.reshard_times import PARTIAL, REPLICATED, ReshardTimes, shardings_of, translated
from sharding.planner.value_groups import ValueGroups
from sharding.rewrite.reshard import chain
from sharding.spec import Dim, Spec

SIZES = {"x": 2, "y": 4}
DEVICES = "h100:1x8"
X_ON_ROWS = Annotation(spec=Spec(dims=(Dim(axes=("x",)), Dim())), origin="test")


def shapes(*all_shapes):
    return [jax.ShapeDtypeStruct(shape, "float32") for shape in all_shapes]


def completed(f, *args, sizes=SIZES, devices=DEVICES, **options):
    with sharding.mesh(sizes, devices=devices) as mesh:
        return sharding.jit(f, **options).complete(*args), sharding.topology(mesh)


def mlp(params, x):
    for w1, w2 in params:
        x = x + jax.nn.relu(x @ w1) @ w2
    return x.sum()


def layers(n, d=64, hidden=256, tokens=512):
    return [tuple(shapes((d, hidden), (hidden, d))) for _ in range(n)], *shapes((tokens, d))


def test_times_of_single_collectives_are_those_of_the_cost_model():
    with sharding.mesh(SIZES, devices=DEVICES) as mesh:
        on = sharding.topology(mesh)
    times, size = ReshardTimes(on), 1e6

    def seconds(have, want):
        return float(times.moves(np.array(have, np.int8), np.array(want, np.int8), size)[0])

    assert seconds((0, 1), (0, 1)) == seconds((REPLICATED, 1), (0, 1)) == 0
    assert seconds((0, REPLICATED), (REPLICATED, REPLICATED)) == cost.collective_seconds("all-gather", size, "x", on)
    assert seconds((0, 1), (0, REPLICATED)) == cost.collective_seconds("all-gather", size / 2, "y", on)
    assert seconds((0, REPLICATED), (1, REPLICATED)) == cost.collective_seconds("all-to-all", size / 2, "x", on)
    assert seconds((PARTIAL, 1), (REPLICATED, 1)) == cost.collective_seconds("all-reduce", size / 4, "x", on)
    assert seconds((PARTIAL, 1), (0, 1)) == cost.collective_seconds("reduce-scatter", size / 4, "x", on)
    assert seconds((PARTIAL, PARTIAL), (REPLICATED,) * 2) == cost.collective_seconds("all-reduce", size, ["x", "y"], on)
    assert seconds((0, 0), (REPLICATED,) * 2) == cost.collective_seconds("all-gather", size, ["x", "y"], on)


def test_each_dim_is_a_collective_of_its_own():
    with sharding.mesh(SIZES, devices=DEVICES) as mesh:
        on = sharding.topology(mesh)
    times, size = ReshardTimes(on), 1e6
    gathers = [cost.collective_seconds("all-gather", *one, on) for one in ((size / 4, "x"), (size, "y"))]
    found, _ = times.moves(np.array((0, 1), np.int8), np.array((REPLICATED,) * 2, np.int8), size)
    assert float(found) == pytest.approx(sum(gathers))
    sums = [cost.collective_seconds("reduce-scatter", *one, on) for one in ((size, "x"), (size / 2, "y"))]
    found, _ = times.moves(np.array((PARTIAL,) * 2, np.int8), np.array((0, 1), np.int8), size)
    assert float(found) == pytest.approx(sum(sums))


def test_times_of_reshards_are_at_most_those_of_the_searched_chains():
    """The chain is cheapest in bytes; as times, sums of the same collectives may differ, but not by much."""
    with sharding.mesh(SIZES, devices=DEVICES) as mesh:
        on = sharding.topology(mesh)
    times, shape = ReshardTimes(on), (1024, 4096)
    every = shardings_of(shape, times.sizes, most=100)
    found, _ = times.moves(every[:, None], every[None], 4 * np.prod(shape))

    def spec(row):
        return Spec(dims=tuple(Dim(axes=tuple(a for a, d in zip(SIZES, row, strict=True) if d == k)) for k in (0, 1)))

    for (i, a), (j, b) in itertools.product(enumerate(every), repeat=2):
        steps = [s for s in chain(spec(a), spec(b), shape, 4, SIZES) if s.kind != "slice"]
        searched = sum(cost.collective_seconds(s.kind, s.num_bytes, s.axes, on) for s in steps)
        assert found[i, j] == pytest.approx(searched, rel=0.5) or len(steps) > 1, (a, b)
        assert (found[i, j] == 0) == (searched == 0), (a, b)


@pytest.mark.parametrize("lengths", [(8, 8), (2, 3, 8), (6,), (1, 5)])
def test_shardings_of_an_array_are_all_that_divide_it(lengths):
    sizes = np.array([2, 4])
    every = {tuple(row) for row in shardings_of(lengths, sizes, most=1000).tolist()}
    expected = set()
    for row in itertools.product(range(-1, len(lengths)), repeat=2):
        parts = [np.prod([s for s, d in zip(sizes, row, strict=True) if d == k]) for k in range(len(lengths))]
        if all(n % p == 0 for n, p in zip(lengths, parts, strict=True)):
            expected.add(row)
    assert every == expected


def test_the_shortest_dims_stay_whole_where_there_are_too_many_shardings():
    rows = shardings_of((8, 64, 16), np.array([2, 2]), most=9)
    assert len(rows) == 9
    assert set(rows.ravel().tolist()) == {REPLICATED, 1, 2}


def test_translation_keeps_partial_and_replicated_axes():
    rows = np.array([[0, 1], [REPLICATED, 0], [PARTIAL, 1]], np.int8)
    assert translated(rows, {0: 5}).tolist() == [[5, REPLICATED], [REPLICATED, 5], [PARTIAL, REPLICATED]]
    assert translated(rows, {0: 5}, default=PARTIAL).tolist() == [[5, PARTIAL], [REPLICATED, 5], [PARTIAL, PARTIAL]]


def test_a_parameter_and_its_state_are_one_group_and_inner_layers_are_tied():
    def step(state, x):
        params, momentum = state
        grads = jax.grad(mlp)(params, x)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
        return jax.tree.map(lambda p, m: p - m, params, momentum), momentum

    params, x = layers(5)
    completion, _ = completed(step, (params, params), x)
    groups = ValueGroups(completion.assignment.graph)
    names = completion.assignment.graph.names

    def tied(name):
        return groups.tied[groups.of(names[name])]

    assert groups.of(names["state/0/0/0"]) == groups.of(names["state/1/0/0"]) == groups.of(names["out/0/0/0"])
    assert groups.of(names["state/0/0/0"]) != groups.of(names["state/0/1/0"])
    assert tied("state/0/1/0") == tied("state/0/2/0") == tied("state/0/3/0") != tied("state/0/1/1")


def test_arrays_of_equal_surroundings_are_tied_by_their_names():
    """Projections that differ by name are decided apart, those of equal layers together."""

    def heads(params, x):
        return sum((x @ layer["query"]).sum() + (x @ layer["key"]).sum() for layer in params)

    w = jax.ShapeDtypeStruct((64, 64), "float32")
    completion, _ = completed(heads, [{"query": w, "key": w} for _ in range(3)], *shapes((512, 64)))
    groups = ValueGroups(completion.assignment.graph)

    def tied(name):
        return groups.tied[groups.of(completion.assignment.graph.names[name])]

    assert tied("params/0/query") == tied("params/1/query") == tied("params/2/query")
    assert tied("params/0/key") == tied("params/1/key") == tied("params/2/key") != tied("params/0/query")


def test_the_problem_does_not_grow_with_equal_layers_but_its_cost_does():
    problems = []
    for n in (4, 8):
        completion, on = completed(jax.grad(mlp), *layers(n))
        problems.append(planner.of_graph(completion.assignment.graph, on).problem)
    four, eight = problems
    assert four.num_nodes == eight.num_nodes
    whole = [0] * four.num_nodes  # replicated
    assert eight.cost(whole) == pytest.approx(2 * four.cost(whole), rel=0.05)


def test_the_cost_of_a_choice_is_the_time_of_its_ops_and_collectives():
    """One product: the sum over the contracted factor is one all-reduce."""
    args = shapes((512, 1024), (1024, 2048))
    completion, on = completed(lambda x, w: x @ w, *args)
    of = planner.of_graph(completion.assignment.graph, on)
    best = np.inf
    for choice in itertools.product(*(range(len(costs)) for costs in of.problem.costs)):
        specs = [of.sharding(v, choice) for v in range(3)]
        if [spec.axes for spec in specs] == [((), ("y",)), (("y",), ()), ((), ())]:
            best = min(best, of.problem.cost(choice))
    compute = 2 * 512 * 1024 * 2048 / 4 / on.chip.rates.matmul_flops_per_second("float32", "default")
    read_and_written = 4 * (512 * 256 + 256 * 2048 + 512 * 2048) / on.chip.memory_bytes_per_second
    total = max(compute, read_and_written) + cost.collective_seconds("all-reduce", 4 * 512 * 2048, "y", on)
    assert best / MICRO == pytest.approx(total, rel=0.01)


def test_collectives_are_weighed():
    """An argument's collectives are hidden, what all put on the wire has a price, and what is forbidden stays."""
    completion, on = completed(lambda x, w: jnp.tanh(x @ w) @ w.T, *shapes((512, 1024), (1024, 2048)))
    of = planner.of_graph(completion.assignment.graph, on, annotations={completion.value("w"): X_ON_ROWS})
    hidden, priced = of.weighed(hidden=0.75).problem, of.weighed(price=1e-9).problem
    rng, seen = np.random.default_rng(0), set()
    for _ in range(500):
        choice = [rng.integers(len(costs)) for costs in of.problem.costs]
        cost_of = of.problem.cost(choice)
        if cost_of >= FORBIDDEN:
            assert hidden.cost(choice) >= FORBIDDEN
            continue
        moves = [moves[:, k] for moves, k in zip(of.node_moves, choice, strict=True)]
        pairs = zip(of.edge_moves, of.problem.edges, strict=True)
        seconds, wire_bytes = sum((*moves, *(moves[:, choice[i], choice[j]] for moves, (i, j) in pairs)))
        assert hidden.cost(choice) == pytest.approx(cost_of - 0.75 * MICRO * seconds)
        assert priced.cost(choice) == pytest.approx(cost_of + 1e-9 * MICRO * wire_bytes)
        seen |= {seconds > 0, wire_bytes > 0}
    assert seen == {True, False}


def test_the_moves_of_a_choice_are_its_collectives():
    """A sum over a sharded dim, whose all-reduce is of no argument."""
    completion, on = completed(lambda x: jnp.tanh(x.sum(0)), *shapes((512, 1024)))
    of = planner.of_graph(completion.assignment.graph, on)
    found = []
    for choice in itertools.product(*(range(len(costs)) for costs in of.problem.costs)):
        if [of.sharding(v, choice).axes for v in (0, 1)] == [(("y",), ()), ((),)]:
            nodes = [moves[:, k] for moves, k in zip(of.node_moves, choice, strict=True)]
            pairs = zip(of.edge_moves, of.problem.edges, strict=True)
            found.append(sum((*nodes, *(moves[:, choice[i], choice[j]] for moves, (i, j) in pairs))))
    wire_bytes = collective_wire_bytes("all-reduce", 4 * 1024, ["y"], on)
    np.testing.assert_allclose(found, [(0.0, wire_bytes)])


def test_an_annotation_is_kept():
    completion, on = completed(lambda x, w: x @ w, *shapes((512, 1024), (1024, 2048)), in_shardings=(P("y"), None))
    of = planner.of_graph(completion.assignment.graph, on, annotations=completion.assignment.graph.annotations)
    solution = planner.solve(of.problem, "exhaustive")
    v = completion.value("x")
    assert of.sharding(v, solution.choice).axes == (("y",), ())


def test_an_op_without_a_rule_reads_whole_arrays():
    def f(x):
        return jax.pure_callback(lambda a: a, jax.ShapeDtypeStruct(x.shape, x.dtype), x * 2)

    completion, on = completed(f, *shapes((256, 256)))
    of = planner.of_graph(completion.assignment.graph, on)
    whole = np.zeros(of.problem.num_nodes, int)
    sharded = whole.copy()
    sharded[of.node_of_value(completion.value("x"))] = 1
    assert of.problem.cost(sharded) > of.problem.cost(whole)


def test_bodies_of_loops_count_as_often_as_they_run():
    def scanned(ws, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]

    costs = []
    for n in (4, 8):
        completion, on = completed(scanned, *shapes((n, 256, 256), (512, 256)))
        of = planner.of_graph(completion.assignment.graph, on)
        costs.append(of.problem.cost([0] * of.problem.num_nodes))
    assert costs[1] == pytest.approx(2 * costs[0], rel=0.1)
