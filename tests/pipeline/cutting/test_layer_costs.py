"""Validation of per-layer lists, with all failures in one error, and sums over ranges of layers."""

import pytest

from sharding.errors import ShardingError
from sharding.pipeline.cutting.layer_costs import check_bandwidths, check_layers, run_sums


def test_the_number_of_layers():
    assert check_layers("it", forward=[1, 0.5, 0], backward=[2, 1, True]) == 3


def test_lists_of_other_lengths_are_named():
    with pytest.raises(ShardingError, match=r"forward has 1 numbers\n +backward has 2 numbers\n +bytes has 0 numbers"):
        check_layers("it", forward=[1], backward=[1, 2], bytes=[])


def test_bad_numbers_of_all_lists_are_named_together():
    with pytest.raises(ShardingError, match=r"2 failures[\s\S]*forward\[1\][\s\S]*-1[\s\S]*backward\[0\][\s\S]*nan"):
        check_layers("it", forward=[1, -1], backward=[float("nan"), 2])


@pytest.mark.parametrize("bandwidth", [0, -1, float("nan"), "fast"])
def test_bad_bandwidths(bandwidth):
    with pytest.raises(ShardingError, match=r"it\(inside\)[\s\S]*a positive number"):
        check_bandwidths("it", inside=bandwidth, between=float("inf"))


def test_sums_of_the_same_numbers_are_the_same():
    sums = run_sums([0.1] * 10)
    assert all(len({sums[begin][length] for begin in range(11 - length)}) == 1 for length in range(11))
    assert run_sums([1, 2, 4])[1] == [0, 2, 6]
