"""Combined all-reduces by hand, and against a slow reference."""

import random

import pytest

from sharding.memory.fusion import Kernel
from sharding.memory.instruction import Instruction
from sharding.memory.kernel_order import xla_cpu_order


def kernel(name, *operands, group=None):
    one = Instruction(name, "unfusible", [k.root for k in operands], (4,), 16, group=group)
    return Kernel(one, [one], list(one.operands))


def names(steps):
    return [" ".join(k.root.name for k in step.kernels) for step in steps]


def test_all_reduces_of_one_group_are_combined_unless_one_depends_on_another():
    x = kernel("x")
    a, b, other = kernel("a", x, group="data"), kernel("b", x, group="data"), kernel("other", x, group="tensor")
    c = kernel("c", a, group="data")
    end = kernel("end", b, c, other)
    assert names(xla_cpu_order([x, a, b, other, c, end], [end.root])) == [
        "x",
        "b a",
        "other",
        "c",
        "end",
    ]  # b is needed first


def test_an_all_reduce_that_depends_on_another_begins_the_next_step():
    # Each gradient's norm is reduced too, before the next gradient.
    x = kernel("x")
    a, b, c = (kernel(name, x, group="data") for name in "abc")
    norms = [kernel(f"norm {k.root.name}", k, group="data") for k in (a, b, c)]
    end = kernel("end", *norms)
    steps = names(xla_cpu_order([x, a, b, c, *norms, end], [end.root]))
    assert steps == ["x", "a", "norm a b", "norm b c", "norm c", "end"]


def test_combining_never_makes_a_cycle():
    # a1 and b1 depend on all-reduces of the other group: combining both pairs would make a cycle.
    x = kernel("x")
    a0, b0 = kernel("a0", x, group="a"), kernel("b0", x, group="b")
    b1, a1 = kernel("b1", a0, group="b"), kernel("a1", b0, group="a")
    end = kernel("end", a1, b1)
    steps = xla_cpu_order([x, a0, b0, b1, a1, end], [end.root])
    assert sorted(" ".join(names(steps)).split()) == sorted(["x", "a0", "b0", "a1", "b1", "end"])
    done = set()
    for step in steps:
        assert {r for k in step.kernels for r in k.operands} <= done
        done |= {k.root for k in step.kernels}
    assert len(steps) == 5


def all_in_order(kernels, results, partner):
    """Kernels in post-order from the results; combined ones (`partner`) are one node."""
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
    """The combined kernels, visiting every kernel again after each combination."""
    partner = {k: (k,) for k in kernels}
    done = set()
    while True:
        order = all_in_order(kernels, results, partner)
        first = next((g for g in order if g[0].root.group is not None and not done & {*g}), None)
        if first is None:
            return {frozenset(g) for g in order}
        combined, behind = list(first), {first}
        for group in order[order.index(first) + 1 :]:
            reads = {partner[k] for one in group for k in kernels if k.root in one.operands}
            is_same_group = group[0].root.group == first[0].root.group and not done & {*group}
            if reads & behind and is_same_group:
                break
            if reads & behind:
                behind.add(group)
            elif is_same_group:
                combined += group
                behind.add(group)
        done |= {*combined}
        partner |= dict.fromkeys(combined, tuple(combined))


@pytest.mark.parametrize("seed", range(30))
def test_combining_agrees_with_the_reference(seed):
    rng = random.Random(seed)
    kernels = []
    for i in range(rng.randint(5, 30)):
        reads = rng.sample(kernels, min(len(kernels), rng.randint(0, 3)))
        kernels.append(kernel(f"k{i}", *reads, group=rng.choice([None, None, "data", "tensor"]) if reads else None))
    results = [k.root for k in rng.sample(kernels, 2)]
    expected = slowly_combined(kernels, results)
    assert {frozenset(step.kernels) for step in xla_cpu_order(kernels, results)} == expected
