"""Reductions and elementwise ops that run with another reader of their array, or with the kernel that makes it."""

import random

import pytest

from sharding.memory.fusion import Kernel
from sharding.memory.instruction import Instruction
from sharding.memory.sibling_fusion import fuse_siblings

LARGE, SMALL = 2**20, 16


def kernel(name, *operands, elements=LARGE, role="fusible"):
    is_elementwise = name in ("add", "mul")
    one = Instruction(name, role, [k.root for k in operands], (elements,), 4 * elements, elementwise=is_elementwise)
    return Kernel(one, [one], list(one.operands))


def fused(*kernels):
    return [[k.root.name for k in unit] for unit in fuse_siblings(kernels)]


def test_a_reduction_runs_with_the_kernel_that_makes_its_array():
    x = kernel("x")
    a, total = kernel("a", x), kernel("reduce_sum", x, elements=1)
    assert fused(x, a, total) == [["x", "reduce_sum"], ["a"]]


def test_a_reduction_runs_with_another_reader_of_its_array():
    x = kernel("x", role="unfusible")
    a, other, total = kernel("a", x), kernel("other", x), kernel("reduce_sum", x, elements=1)
    assert fused(x, a, total) == [["x"], ["a", "reduce_sum"]]
    assert fused(x, total, other, a) == [["x"], ["other", "reduce_sum"], ["a"]]


def test_a_reader_that_needs_the_sum_runs_after_it():
    x = kernel("x", role="unfusible")
    total = kernel("reduce_sum", x, elements=1)
    scaled = kernel("scaled", x, total)
    assert fused(x, total, scaled) == [["x"], ["reduce_sum"], ["scaled"]]


def test_a_reduction_waits_for_its_other_operands():
    x = kernel("x", role="unfusible")
    a, late = kernel("a", x), kernel("late", role="unfusible")
    total = kernel("reduce_sum", x, late, elements=1)
    assert fused(x, a, late, total) == [["x"], ["a"], ["late"], ["reduce_sum"]]


def test_what_reads_a_reduction_stays_where_it_is():
    x = kernel("x", role="unfusible")
    total = kernel("reduce_sum", x, elements=1)
    half, unrelated = kernel("half", total, elements=1), kernel("unrelated")
    a, end = kernel("a", x), kernel("end", half, elements=1)
    assert fused(x, total, half, unrelated, a, end) == [["x"], ["reduce_sum"], ["half"], ["unrelated"], ["a"], ["end"]]


def test_elementwise_kernels_move_down_to_the_next_one_that_reads_the_same_array():
    x, y = kernel("x", role="unfusible"), kernel("y", role="unfusible")
    moment = kernel("mul", x, y)
    weight = kernel("add", x, moment)
    assert fused(x, y, moment, weight) == [["x"], ["y"], ["add", "mul"]]
    needed = kernel("other", moment)
    assert fused(x, y, moment, needed, weight) == [["x"], ["y"], ["mul"], ["other"], ["add"]]


def test_small_arrays_and_other_kernels_stay_apart():
    x, small = kernel("x", role="unfusible"), kernel("small", elements=16)
    a, b, total = kernel("a", x), kernel("b", x), kernel("reduce_sum", small, elements=1)
    c = kernel("c", small, elements=16)
    assert fused(x, small, a, b, c, total) == [[name] for name in ("x", "small", "a", "b", "c", "reduce_sum")]


@pytest.mark.parametrize("seed", range(60))
def test_kernels_of_a_random_program_run_once_and_after_what_they_read(seed):
    r = random.Random(seed)
    kernels = [kernel("x"), kernel("y", role="unfusible")]
    for _ in range(20):
        name = r.choice(["reduce_sum", "add", "a"])
        kernels.append(
            kernel(name, *r.sample(kernels[-6:], min(2, len(kernels))), elements=r.choice([LARGE, LARGE, SMALL]))
        )
    units = fuse_siblings(kernels)
    assert sorted(id(k) for unit in units for k in unit) == sorted(map(id, kernels))
    done = set()
    for unit in units:
        roots = {k.root for k in unit}
        assert all((done | roots).issuperset(k.operands) for k in unit)
        done |= roots
        if len(unit) > 1:
            assert all(any(are_joined(k, other) for other in unit if other is not k) for k in unit)


def are_joined(a, b):
    """Whether kernels read the same array, or one reads what the other makes."""
    first, second = ({*k.operands, k.root} for k in (a, b))
    return not first.isdisjoint(second)
