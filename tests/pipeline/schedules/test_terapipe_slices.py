"""TeraPipe against the closed form of a flow shop."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharding.errors import ShardingError
from sharding.pipeline import schedules


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 3))
def test_makespan_of_uneven_slices(stages, times, microbatches):
    """sum(t) + (K - 1) max(t), forward and backward."""
    schedule = schedules.terapipe(stages=stages, microbatches=microbatches, slices=len(times))
    simulation = schedule.simulate(forward=lambda task: times[task.slice], backward=lambda task: 2 * times[task.slice])
    assert simulation.makespan == 3 * (microbatches * sum(times) + (stages - 1) * max(times))


@pytest.mark.parametrize("slices", [1, 2, 5])
def test_equal_slices(slices):
    """As GPipe with `slices` times as many, smaller microbatches; all activations are stashed."""
    simulation = schedules.terapipe(stages=4, microbatches=3, slices=slices).simulate(forward=1.0, backward=2.0)
    assert simulation.makespan == pytest.approx(3 * (3 + 3 / slices))
    assert simulation.peak_activations == pytest.approx((3,) * 4)


def test_slices_go_back_the_other_way():
    order = schedules.terapipe(stages=1, microbatches=2, slices=2).orders[0]
    assert [task.label for task in order] == ["F0", "F0.1", "F1", "F1.1", "B1.1", "B1", "B0.1", "B0"]


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_sizes_that_cannot_be(sizes):
    with pytest.raises(ShardingError, match="schedules.terapipe\n  found:    [a-z]+=0"):
        schedules.terapipe(stages=sizes[0], microbatches=sizes[1], slices=sizes[2])
