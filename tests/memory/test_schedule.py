"""Orders of kernels by hand, and all-reduces combined in the obvious way."""

import random

import pytest

from sharding.memory.fusion import Kernel
from sharding.memory.instruction import Instruction
from sharding.memory.schedule import as_ready, as_written


def kernel(name, *operands, group=None):
    one = Instruction(name, "library", [k.root for k in operands], (4,), 16, group=group)
    return Kernel(one, [one], list(one.operands))


def names(steps):
    return [" ".join(k.root.name for k in step.kernels) for step in steps]


def test_what_is_ready_first_runs_first():
    x = kernel("x")
    a1, b1 = kernel("a1", x), kernel("b1", x)
    a2, b2 = kernel("a2", a1), kernel("b2", b1)
    end = kernel("end", a2, b2)
    written = [x, a1, a2, b1, b2, end]
    assert names(as_ready(written, [end.root])) == ["x", "a1", "b1", "a2", "b2", "end"]
    assert names(as_written(written, [end.root])) == ["x", "a1", "a2", "b1", "b2", "end"]


def test_sums_over_the_same_devices_are_one_step_unless_one_waits_for_another():
    x = kernel("x")
    a, b, other = kernel("a", x, group="data"), kernel("b", x, group="data"), kernel("other", x, group="tensor")
    c = kernel("c", a, group="data")
    end = kernel("end", b, c, other)
    assert names(as_ready([x, a, b, other, c, end], [end.root])) == [
        "x",
        "b a",
        "other",
        "c",
        "end",
    ]  # b is needed first


def test_what_waits_for_a_sum_begins_the_next_step():
    # Of each gradient's sum the norm is summed, too, before the next gradient's turn comes.
    x = kernel("x")
    a, b, c = (kernel(name, x, group="data") for name in "abc")
    norms = [kernel(f"norm {k.root.name}", k, group="data") for k in (a, b, c)]
    end = kernel("end", *norms)
    steps = names(as_ready([x, a, b, c, *norms, end], [end.root]))
    assert steps == ["x", "a", "norm a b", "norm b c", "norm c", "end"]


def test_combining_never_makes_a_circle():
    # a1 and b1 wait for sums of the other group: were both pairs combined, each would wait for the other.
    x = kernel("x")
    a0, b0 = kernel("a0", x, group="a"), kernel("b0", x, group="b")
    b1, a1 = kernel("b1", a0, group="b"), kernel("a1", b0, group="a")
    end = kernel("end", a1, b1)
    steps = as_ready([x, a0, b0, b1, a1, end], [end.root])
    assert sorted(" ".join(names(steps)).split()) == sorted(["x", "a0", "b0", "a1", "b1", "end"])
    done = set()
    for step in steps:
        assert {r for k in step.kernels for r in k.operands} <= done
        done |= {k.root for k in step.kernels}
    assert len(steps) == 5


def all_in_order(kernels, results, partner):
    """Kernels behind what they read, by a walk from the results; those with a `partner` are one with it."""
    maker = {k.root: k for k in kernels}
    order = {}

    def visit(group):
        if group in order:
            return
        reads = [partner[maker[x]] for k in group for x in k.operands if x is not k.root]
        for other in reads:
            if other != group:
                visit(other)
        order[group] = None

    for k in [*(maker[x] for x in results), *kernels]:
        visit(partner[k])
    return list(order)


def slowly_combined(kernels, results):
    """The groups of kernels that are one step, every kernel being walked to anew after each."""
    partner = {k: (k,) for k in kernels}
    done = set()
    while True:
        order = all_in_order(kernels, results, partner)
        first = next((g for g in order if g[0].root.group is not None and not done & {*g}), None)
        if first is None:
            return {frozenset(g) for g in order}
        joined, behind = list(first), {first}
        for group in order[order.index(first) + 1 :]:
            reads = {partner[k] for one in group for k in kernels if k.root in one.operands}
            is_alike = group[0].root.group == first[0].root.group and not done & {*group}
            if reads & behind and is_alike:
                break
            if reads & behind:
                behind.add(group)
            elif is_alike:
                joined += group
                behind.add(group)
        done |= {*joined}
        partner |= dict.fromkeys(joined, tuple(joined))


@pytest.mark.parametrize("seed", range(30))
def test_sums_are_combined_as_by_walking_to_every_kernel(seed):
    rng = random.Random(seed)
    kernels = []
    for i in range(rng.randint(5, 30)):
        reads = rng.sample(kernels, min(len(kernels), rng.randint(0, 3)))
        kernels.append(kernel(f"k{i}", *reads, group=rng.choice([None, None, "data", "tensor"]) if reads else None))
    results = [k.root for k in rng.sample(kernels, 2)]
    expected = slowly_combined(kernels, results)
    assert {frozenset(step.kernels) for step in as_ready(kernels, results)} == expected
