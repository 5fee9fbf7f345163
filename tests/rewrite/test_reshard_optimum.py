"""Reshard chains against the shortest of all paths between specs, and their steps against what devices hold."""

import functools
import itertools
import math
import random

import pytest

from sharding.cost import wire_bytes
from sharding.rewrite import reshard
from sharding.spec import Dim, MeshSizes, Spec, num_parts

ITEM = 4


def spec(dims):
    return Spec(dims=tuple(Dim(axes=axes) for axes in dims))


def shardings(axes, ndim):
    """Every sharding of some dims over some axes."""
    found = {}
    for order in itertools.permutations(axes):
        for places in itertools.product(range(-1, ndim), repeat=len(order)):
            dims = (tuple(a for a, p in zip(order, places, strict=True) if p == d) for d in range(ndim))
            found[tuple(dims)] = None
    return [*found]


def step_between(old, new, sizes):
    """(kind, axes of its groups) of the one step between two specs; None if they are further apart."""
    differ = [d for d, (x, y) in enumerate(zip(old, new, strict=True)) if x != y]
    grown = [d for d in differ if new[d][: len(old[d])] == old[d]]
    shrunk = [d for d in differ if old[d][: len(new[d])] == new[d]]
    if differ == grown:
        return "slice", tuple(a for d in grown for a in new[d][len(old[d]) :])
    if differ == shrunk and len(differ) == 1:
        (d,) = differ
        return "all-gather", old[d][len(new[d]) :]
    if len(differ) == 2 and len(grown) == len(shrunk) == 1:
        moved = old[shrunk[0]][len(new[shrunk[0]]) :]
        if moved == new[grown[0]][len(old[grown[0]]) :]:
            return "all-to-all", moved
    if all(num_parts(x, sizes) == num_parts(y, sizes) for x, y in zip(old, new, strict=True)):
        return "collective-permute", tuple(dict.fromkeys(a for d in differ for a in (*old[d], *new[d])))
    return None


def held_bytes(dims, shape, sizes):
    return ITEM * math.prod(n // num_parts(axes, sizes) for n, axes in zip(shape, dims, strict=True))


def step_cost(step, new, shape, sizes, costs):
    """Bytes that a device sends by the definition of each collective, weighed by the links, and the cost of a step."""
    kind, axes = step
    if kind == "slice":
        return 0.0
    num_bytes, n = held_bytes(new, shape, sizes), num_parts(axes, sizes)
    sent = num_bytes if kind == "collective-permute" else num_bytes * (n - 1) // n
    slow = max(costs.get(a, 1.0) for a in axes)
    fast = math.prod(sizes[a] for a in axes if costs.get(a, 1.0) < slow)
    return sent * (slow if fast == 1 else 1 + (slow - 1) / fast) + reshard.STEP_BYTES


@functools.cache
def all_steps(shape, sizes, costs):
    """(from, to) -> (kind, cost) of every step."""
    nodes, sizes, costs = shardings(dict(sizes), len(shape)), dict(sizes), dict(costs)
    steps = {(x, y): step_between(x, y, sizes) for x, y in itertools.permutations(nodes, 2)}
    return {
        (x, y): (step[0], step_cost(step, y, shape, sizes, costs)) for (x, y), step in steps.items() if step is not None
    }


def shortest(before, after, shape, sizes, costs):
    """The cost of the cheapest path, of which no slice shards a dim that it changes further than the target does."""
    goal = [num_parts(axes, sizes) for axes in after]
    goal_axes = {a for axes in after for a in axes}

    def is_allowed(x, y):
        for old, new, most in zip(x, y, goal, strict=True):
            if old != new and (most % num_parts(new, sizes) or not {*new} - {*old} <= goal_axes):
                return False
        return True

    steps = all_steps(shape, tuple(sizes.items()), tuple(costs.items()))
    far = dict.fromkeys(shardings(sizes, len(shape)), math.inf) | {before: 0.0}
    links = [(x, y, own) for (x, y), (kind, own) in steps.items() if kind != "slice" or is_allowed(x, y)]
    changed = True
    while changed:
        changed = False
        for x, y, own in links:
            if far[x] + own < far[y] - 1e-6:
                far[y], changed = far[x] + own, True
    return far[after]


@pytest.mark.parametrize("shape", [(48, 36), (480, 3600)], ids=str)
@pytest.mark.parametrize("costs", [{}, {"a": 6.0}, {"b": 3.0, "c": 9.0}], ids=str)
def test_no_path_between_any_specs_is_cheaper(shape, costs):
    sizes = {"a": 3, "b": 2, "c": 2}
    pairs = [*itertools.product(shardings(sizes, 2), repeat=2)]
    steered = 0
    for before, after in random.Random(1).sample(pairs, 80):
        steps = reshard.chain(spec(before), spec(after), shape, ITEM, MeshSizes(sizes, costs))
        least, found = shortest(before, after, shape, sizes, costs), reshard.chain_cost(steps)
        if costs:  # permutes between other specs than the two could keep some bytes off the slow links
            blind = reshard.chain(spec(before), spec(after), shape, ITEM, sizes)
            weighed = sum(step_cost((step.kind, step.axes), step.spec.axes, shape, sizes, costs) for step in blind)
            assert least - 1e-6 <= found <= weighed + 1e-6
            steered += found < weighed - 1e-6
        else:
            assert found == pytest.approx(least), (before, after, steps)
    assert steered > 3 or not costs


def test_each_step_is_what_it_says():
    sizes, shape = {"a": 3, "b": 2, "c": 2}, (48, 36)
    for before, after in random.Random(2).sample([*itertools.product(shardings(sizes, 2), repeat=2)], 150):
        at = before
        for step in reshard.chain(spec(before), spec(after), shape, ITEM, sizes):
            kind, axes = step_between(at, step.spec.axes, sizes)
            assert (step.kind, {*step.axes}) == (kind, {*axes})
            at = step.spec.axes
            assert step.num_bytes == held_bytes(at, shape, sizes)
            expected = 0 if kind == "slice" else wire_bytes(kind, step.num_bytes, num_parts(axes, sizes))
            assert step.wire_bytes == expected and not step.is_sum
        assert at == after


def parts(dims):
    """The same over the halves of the axis `a` of size 4."""
    halves = {"a": (("a", 1, 2), ("a", 2, 2))}
    return tuple(tuple(p for axis in axes for p in halves.get(axis, (axis,))) for axes in dims)


def test_halves_of_an_axis_are_used_where_they_save():
    """Between the optimum over undivided axes and that over all halves; the latter wherever it takes few bytes."""
    sizes, shape = {"a": 4, "b": 2}, (480, 480)
    nodes = shardings([("a", 1, 2), ("a", 2, 2), "b"], 2)
    halves = {x: tuple(tuple("".join(map(str, axis)) for axis in axes) for axes in x) for x in nodes}
    named = {"a12": 2, "a22": 2, "b": 2}
    saved = 0
    for before, after in itertools.permutations(shardings(sizes, 2), 2):
        found = reshard.chain_cost(reshard.chain(spec(before), spec(after), shape, ITEM, sizes))
        least = shortest(halves[parts(before)], halves[parts(after)], shape, named, {})
        plain = shortest(before, after, shape, sizes, {})
        assert least <= found <= plain
        saved += found < plain
    assert saved > 5


def test_too_many_halves_are_reported():
    sizes = {"a": 4, "b": 2, "c": 8}
    few, many = (
        (spec((("a",), ("b",))), spec((("b",), ("a",)))),
        (spec((("a", "c"), ("b",))), spec((("b",), ("c", "a")))),
    )
    shape = (480, 480)
    assert not reshard.is_cut_short(*few, shape, ITEM, sizes)
    assert reshard.is_cut_short(*many, shape, ITEM, sizes)
    assert not reshard.is_cut_short(many[0], many[0], shape, ITEM, sizes)
    as_many_as_are_searched = {"a": 2, "b": 4, "c": 3}  # three axes and the halves of one
    assert not reshard.is_cut_short(*many, shape, ITEM, as_many_as_are_searched)
    assert not reshard.is_cut_short(*many, shape, ITEM, {"a": 2, "b": 2, "c": 2})  # halves of equal axes: no shorter


EIGHT = dict.fromkeys("abcdefgh", 2)


def test_moves_over_eight_axes_take_few_steps():
    """The lower bound keeps the search from specs that lead nowhere."""
    before, after = spec((("a", "b", "c", "d"), ("e", "f", "g", "h"))), spec((("a", "b", "c"), ()))
    steps = reshard.chain(before, after, (512, 512), ITEM, EIGHT)
    assert [(step.kind, step.axes) for step in steps] == [("all-gather", ("d",)), ("all-gather", ("e", "f", "g", "h"))]
    assert not reshard.is_cut_short(before, after, (512, 512), ITEM, EIGHT)
    swapped = spec((("e", "f", "g", "h"), ("a", "b", "c", "d")))
    assert [step.kind for step in reshard.chain(before, swapped, (512, 512), ITEM, EIGHT)] == ["collective-permute"]


@pytest.mark.parametrize("most", [200, 2_000])
def test_a_search_with_too_many_specs_ends_and_says_so(most, monkeypatch):
    monkeypatch.setattr(reshard, "MAX_MOVES", most)
    monkeypatch.setattr(reshard, "MAX_PIECES", 99)
    reshard._chain.cache_clear()
    dims = (("b", "h"), ("f",), ("c", "d"), ()), (("d",), (), ("a", "f", "c"), ("e", "b", "g"))
    before, after = map(spec, dims)
    steps = reshard.chain(before, after, (512,) * 4, ITEM, EIGHT)
    assert reshard.is_cut_short(before, after, (512,) * 4, ITEM, EIGHT)
    assert steps[-1].spec == after
    gathered = reshard._gather_then_slice(*dims, (512,) * 4, ITEM, EIGHT)
    assert reshard.chain_cost(steps) <= reshard.chain_cost(gathered)
    at = dims[0]
    for step in steps:
        assert step_between(at, step.spec.axes, EIGHT) == (step.kind, step.axes) or step.kind == "collective-permute"
        at = step.spec.axes
    reshard._chain.cache_clear()


UNEVEN = [
    # shards of a dim of 7 over 2 are 4 long: both are sent in full, with the padding
    (((("b",), ()), ((), ())), (7, 6), "all-gather", 4 * 6 * 2),
    (((("b",), ()), ((), ("b",))), (7, 6), "all-to-all", 4 * 2 * 3),
    # of 5 elements over 6 devices, gathered over 3 and 2: each has one, or none
    (((("a", "b"), ()), ((), ())), (5, 6), "all-gather", 1 * 6 * 6),
    # of 3 elements over 6 devices, half have none: XLA adds up instead of gathering
    (((("a", "b"), ()), ((), ())), (3, 6), "all-reduce", 3 * 6),
    (((("b",), ()), ((), ())), (1, 6), "all-reduce", 6),
    (((("b",), ()), ((), ())), (2, 6), "all-gather", 2 * 6),
]


@pytest.mark.parametrize(("pair", "shape", "kind", "elements"), UNEVEN)
def test_bytes_of_uneven_shards(pair, shape, kind, elements):
    sizes = {"a": 3, "b": 2}
    (step,) = reshard.chain(spec(pair[0]), spec(pair[1]), shape, ITEM, sizes)
    assert (step.kind, step.num_bytes) == (kind, ITEM * elements)
    n = num_parts(step.axes, sizes)
    factor = {"all-gather": 1, "all-to-all": 1, "all-reduce": 2}[kind]
    assert step.wire_bytes == factor * ITEM * elements * (n - 1) // n


def test_an_all_to_all_takes_all_axes_of_an_uneven_dim_or_none():
    """XLA would gather a dim of 7 over 6 devices if some of the axes stayed."""
    sizes = {"a": 3, "b": 2}
    before, after = spec((("a", "b"), ())), spec((("a",), ("b",)))
    even = reshard.chain(before, after, (12, 12), ITEM, sizes)
    assert [step.kind for step in even] == ["all-to-all"]
    uneven = reshard.chain(before, after, (70, 12), ITEM, sizes)
    assert "all-to-all" not in [step.kind for step in uneven if step.axes == ("b",)]
    whole = reshard.chain(before, spec(((), ("a", "b"))), (70, 12), ITEM, sizes)
    assert [step.kind for step in whole] == ["all-to-all"]


def test_without_permutes_uneven_dims_are_gathered_then_sliced():
    sizes = {"a": 3, "b": 2}
    swapped = reshard.chain(spec((("a",), ("b",))), spec((("b",), ("a",))), (7, 5), ITEM, sizes, permutes=False)
    assert [(step.kind, step.axes) for step in swapped] == [
        ("all-gather", ("a",)),
        ("all-gather", ("b",)),
        ("slice", ("b", "a")),
    ]
    assert [step.spec.axes for step in swapped] == [((), ("b",)), ((), ()), (("b",), ("a",))]
    # a dim that stays keeps its uneven shards
    moved = reshard.chain(spec((("a",), ("b",))), spec((("a",), ())), (7, 6), ITEM, sizes, permutes=False)
    assert [(step.kind, step.num_bytes) for step in moved] == [("all-gather", ITEM * 3 * 6)]
    even = reshard.chain(spec((("a",), ())), spec(((), ("a",))), (12, 12), ITEM, sizes, permutes=False)
    assert [step.kind for step in even] == ["all-to-all"]


def test_a_chain_to_the_same_spec_is_empty():
    for dims in shardings({"a": 3, "b": 2}, 2):
        assert reshard.chain(spec(dims), spec(dims), (7, 5), ITEM, {"a": 3, "b": 2}) == ()
