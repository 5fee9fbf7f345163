"""Reductions that run with another reader of their array."""

import random

import pytest

from sharding.memory.fusion import Kernel
from sharding.memory.instruction import Instruction
from sharding.memory.sibling_fusion import fuse_siblings

LARGE, SMALL = 2**20, 16


def kernel(name, *operands, elements=LARGE):
    one = Instruction(name, "fusible", [k.root for k in operands], (elements,), 4 * elements)
    return Kernel(one, [one], list(one.operands))


def fused(*kernels, **options):
    return [[k.root.name for k in unit] for unit in fuse_siblings(kernels, **options)]


def test_a_reduction_runs_with_another_reader_of_its_array():
    x = kernel("x")
    a, other, total = kernel("a", x), kernel("other", x), kernel("reduce_sum", x, elements=1)
    assert fused(x, a, total) == [["x"], ["a", "reduce_sum"]]
    assert fused(x, total, other, a) == [["x"], ["other", "reduce_sum"], ["a"]]


def test_a_reader_that_needs_the_sum_runs_after_it():
    x = kernel("x")
    total = kernel("reduce_sum", x, elements=1)
    scaled = kernel("scaled", x, total)
    assert fused(x, total, scaled) == [["x"], ["reduce_sum"], ["scaled"]]


def test_a_reduction_waits_for_its_other_operands():
    x = kernel("x")
    a, late = kernel("a", x), kernel("late")
    total = kernel("reduce_sum", x, late, elements=1)
    assert fused(x, a, late, total) == [["x"], ["a"], ["late"], ["reduce_sum"]]


def test_what_reads_a_reduction_may_move_down_with_it():
    x = kernel("x")
    total = kernel("reduce_sum", x, elements=1)
    half, unrelated = kernel("half", total, elements=1), kernel("unrelated")
    a, end = kernel("a", x), kernel("end", half, elements=1)
    written = (x, total, half, unrelated, a, end)
    assert fused(*written) == [["x"], ["reduce_sum"], ["half"], ["unrelated"], ["a"], ["end"]]
    assert fused(*written, reorders=True) == [["x"], ["unrelated"], ["a", "reduce_sum"], ["half"], ["end"]]
    scaled = kernel("scaled", x, half)
    assert fused(x, total, half, scaled) == [["x"], ["reduce_sum"], ["half"], ["scaled"]]
    assert fused(x, total, half, scaled, reorders=True) == [["x", "reduce_sum"], ["half"], ["scaled"]]


def test_small_arrays_and_other_kernels_stay_apart():
    x, small = kernel("x"), kernel("small", elements=16)
    a, b, total = kernel("a", x), kernel("b", x), kernel("reduce_sum", small, elements=1)
    c = kernel("c", small, elements=16)
    assert fused(x, small, a, b, c, total) == [[name] for name in ("x", "small", "a", "b", "c", "reduce_sum")]


def test_what_picks_from_a_large_array_runs_with_another_reader_of_a_small_one():
    """As the logits of labels, with the gradient of a logarithm, so that the logits are free."""
    logits, sums = kernel("logits"), kernel("sums", elements=SMALL)
    inverse, unrelated = kernel("inverse", sums, elements=SMALL), kernel("unrelated")
    loss = kernel("loss", logits, sums, elements=SMALL)
    written = (logits, sums, inverse, unrelated, loss)
    assert fused(*written, reorders=True) == [["logits"], ["sums"], ["inverse", "loss"], ["unrelated"]]
    assert fused(*written) == [[name] for name in ("logits", "sums", "inverse", "unrelated", "loss")]
    apart = logits, kernel("scaled", logits), unrelated, kernel("picked", logits, elements=SMALL)
    assert fused(*apart, reorders=True) == [[k.root.name] for k in apart]


@pytest.mark.parametrize("reorders", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_kernels_of_a_random_program_run_once_and_after_what_they_read(seed, reorders):
    r = random.Random(seed)
    kernels = [kernel("x"), kernel("y")]
    for _ in range(20):
        name = r.choice(["reduce_sum", "add"])
        kernels.append(
            kernel(name, *r.sample(kernels[-6:], min(2, len(kernels))), elements=r.choice([LARGE, LARGE, SMALL]))
        )
    units = fuse_siblings(kernels, reorders=reorders)
    assert sorted(id(k) for unit in units for k in unit) == sorted(map(id, kernels))
    done = set()
    for unit in units:
        inside = set()
        for k in unit:
            assert (done | inside).issuperset(k.operands)
            assert done.issuperset(k.operands) or (reorders and k.root.name == "reduce_sum")
            inside.add(k.root)
        done |= {k.root for k in unit}
        if len(unit) > 1:
            picking = [
                k for k in unit if k.root.num_elements == SMALL and any(x.num_elements == LARGE for x in k.operands)
            ]
            assert picking or any(k.root.name == "reduce_sum" for k in unit)
            assert reorders or any(k.root.name == "reduce_sum" for k in unit)
            assert all(any(are_joined(k, other, reorders) for other in unit if other is not k) for k in unit)


def are_joined(a, b, reorders):
    """Whether kernels read the same array, or one reads what the other makes, where that may be."""
    first, second = ({*k.operands, *([k.root] if reorders else [])} for k in (a, b))
    return not first.isdisjoint(second)
