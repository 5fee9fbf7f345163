"""Strategies of matrix products on random shapes and specs: their cost by steps, and that no choice costs less."""

import itertools
import math
import random

import numpy as np
import pytest

from sharding.cost import wire_bytes
from sharding.graph import Graph, Op
from sharding.propagation import Assignment
from sharding.rewrite import reshard
from sharding.rewrite.op_strategy import BYTES_PER_MULTIPLY_ADD, OpStrategies
from sharding.rules import rule_for
from sharding.spec import Dim, MeshSizes, Spec, byte_cost, num_parts

ITEM = 4
NUMBERS = {"dimension_numbers": (((1,), (0,)), ((), ()))}
MESHES = [MeshSizes({"a": 2, "b": 4}), MeshSizes({"a": 2, "b": 2, "c": 2}), MeshSizes({"a": 2, "b": 4}, {"a": 5.0})]


def spec(dims):
    return Spec(dims=tuple(Dim(axes=axes) for axes in dims))


def random_spec(rng, sizes):
    axes, dims = rng.sample([*sizes], len(sizes)), [(), ()]
    for axis in axes:
        at = rng.choice([0, 1, None])
        if at is not None:
            dims[at] = (*dims[at], axis)
    return spec(dims)


def strategy_of(shapes, specs, sizes):
    rule = rule_for("dot_general", shapes[:2], shapes[2:], NUMBERS)
    op = Op("dot_general", (0, 1), (2,), rule, (), 1)
    graph = Graph(shapes=[*shapes], dtypes=[np.dtype("float32")] * 3, ops=[op], inputs=[0, 1], outputs=[2])
    assignment = Assignment(graph=graph, sizes=sizes, specs=tuple(specs), find_reason=None, with_annotations=None)
    return OpStrategies(assignment).of(op)


def cost_of(steps):
    return sum(step.wire_bytes * step.byte_cost + (reshard.STEP_BYTES if step.kind != "slice" else 0) for step in steps)


def multiply_adds(i, k, j, factors, sizes):
    return math.prod(-(-n // num_parts(axes, sizes)) for n, axes in zip((i, k, j), factors, strict=True))


def choices(specs):
    """For each factor i, k, j what its arrays shard it over; nothing, too, if they differ or other factors want it."""
    (x_i, x_k), (w_k, w_j), (o_i, o_j) = (one.axes for one in specs)
    options = [[*dict.fromkeys(seen)] for seen in ((o_i, x_i), (x_k, w_k), (o_j, w_j))]
    wanted = [{axis for axes in seen for axis in axes} for seen in options]
    for k, seen in enumerate(options):
        others = set().union(*wanted[:k], *wanted[k + 1 :])
        if (len(seen) > 1 or wanted[k] & others) and () not in seen:
            seen.append(())
    for chosen in itertools.product(*options):
        axes = [axis for one in chosen for axis in one]
        if len(set(axes)) == len(axes):
            yield chosen


def is_scattered(shapes, specs, factors, sizes):
    """Whether a choice ends in a sum of which devices keep slices along its axes: XLA does not all-reduce that."""
    i, k, j = factors
    after = reshard.chain(spec((i, j)), specs[2], shapes[2], ITEM, sizes)
    sliced = {axis for step in after for axis in step.axes}
    return bool(sliced) and sliced <= {*k} and {step.kind for step in after} == {"slice"}


def all_reduced_cost(shapes, specs, factors, sizes):
    """The cost of a choice whose sum is all-reduced, then resharded."""
    i, k, j = factors
    chains = [
        reshard.chain(have, spec(want), shape, ITEM, sizes)
        for have, want, shape in zip(specs, ((i, k), (k, j)), shapes, strict=False)
    ]
    total = sum(map(cost_of, chains)) + cost_of(reshard.chain(spec((i, j)), specs[2], shapes[2], ITEM, sizes))
    if k:
        local = ITEM * math.prod(-(-n // num_parts(axes, sizes)) for n, axes in zip(shapes[2], (i, j), strict=True))
        total += wire_bytes("all-reduce", local, num_parts(k, sizes)) * byte_cost(k, sizes) + reshard.STEP_BYTES
    (m, inner), (_, n) = shapes[:2]
    return total + BYTES_PER_MULTIPLY_ADD * multiply_adds(m, inner, n, factors, sizes)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_strategies_of_products(sizes):
    rng = random.Random(0)
    kinds, exact = set(), 0
    for _ in range(60):
        m, k, n = (rng.choice([8, 16, 64, 256, 2048]) for _ in range(3))
        shapes = ((m, k), (k, n), (m, n))
        specs = [random_spec(rng, sizes) for _ in shapes]
        found = strategy_of(shapes, specs, sizes)
        (x_i, x_k), (w_k, w_j), (o_i, o_j) = (one.axes for one in (*found.operand_specs, *found.result_specs))
        assert (x_i, x_k, w_j) == (o_i, w_k, o_j)  # one sharding per factor while it runs
        factors = (x_i, x_k, w_j)
        for have, want, shape, steps in zip(specs, found.operand_specs, shapes, found.operand_steps, strict=False):
            assert steps == reshard.chain(have, want, shape, ITEM, sizes)
        (after,) = found.result_steps
        assert {axis for step in after if step.is_sum for axis in step.axes} == {*x_k}
        assert (after[-1].spec if after else found.result_specs[0]).axes == specs[2].axes
        for step in after:
            if step.is_sum and step.kind != "collective-permute":
                assert step.wire_bytes == wire_bytes(step.kind, step.num_bytes, num_parts(step.axes, sizes))
                assert step.byte_cost == pytest.approx(byte_cost(step.axes, sizes))
        kinds.update(step.kind for step in found.steps)
        work = BYTES_PER_MULTIPLY_ADD * multiply_adds(m, k, n, factors, sizes)
        assert found.cost == pytest.approx(cost_of(found.steps) + work)
        others = [*choices(specs)]
        costs = [
            all_reduced_cost(shapes, specs, other, sizes)
            for other in others
            if not is_scattered(shapes, specs, other, sizes)
        ]
        assert found.cost <= min(costs, default=math.inf) + 1e-6, (shapes, specs)
        if len(costs) == len(others):
            assert found.cost == pytest.approx(min(costs)), (shapes, specs)
            exact += 1
    assert exact > 20
    assert kinds >= {"all-gather", "all-reduce", "all-to-all", "slice", "reduce-scatter"}


def test_a_sum_is_scattered_over_axes_of_the_sum_alone():
    sizes = {"a": 2, "b": 4}
    shapes = ((64, 8192), (8192, 64), (64, 64))  # long sums, so that each device adds up its own part
    summed = [spec(((), ("a", "b"))), spec((("a", "b"), ()))]
    local = 64 * 64 * ITEM

    def steps(result, sizes=sizes, summed=summed):
        (found,) = strategy_of(shapes, [*summed, spec(result)], sizes).result_steps
        return [(step.kind, step.axes, step.num_bytes) for step in found]

    assert steps(((), ())) == [("all-reduce", ("a", "b"), local)]
    assert steps((("a", "b"), ())) == [("reduce-scatter", ("a", "b"), local)]
    assert steps(((), ("b",))) == [("reduce-scatter", ("b",), local), ("all-reduce", ("a",), local // 4)]
    # beside a device that would compute the same, the shards are summed, then moved
    idle = {"a": 2, "b": 2, "c": 2}
    over_a = [spec(((), ("a",))), spec((("a",), ()))]
    beside = [spec(((), ("a", "b"))), spec((("a", "b"), ()))]
    assert steps((("a",), ()), idle, over_a) == [("reduce-scatter", ("a",), local)]
    assert steps((("a",), ()), idle, beside) == [
        ("all-reduce", ("a", "b"), local // 2),
        ("collective-permute", ("a", "c"), local // 2),
    ]
    # one idle device cannot stand for four
    assert steps((("b",), ()), {"a": 2, "b": 4, "c": 2}, summed)[0][0] == "reduce-scatter"


def test_what_no_array_disputes_stays():
    """Both operands are sharded over a along the sum: it is reduced, though to gather them would send less."""
    shapes = ((2048, 8), (8, 2048), (2048, 2048))
    specs = [spec(((), ("a",))), spec((("a",), ())), spec(((), ()))]
    found = strategy_of(shapes, specs, {"a": 2, "b": 4})
    assert [step.kind for step in found.steps] == ["all-reduce"] and not any(found.operand_steps)
