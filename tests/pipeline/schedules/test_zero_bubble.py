"""Zero-bubble schedules against their closed forms: a forward takes F, the parts of a backward I and W."""

import pytest

from sharding.errors import ShardingError
from sharding.pipeline import schedules

TIMES = [(1.0, 1.0, 1.0), (2.0, 2.0, 2.0), (1.0, 1.25, 0.75), (2.0, 2.0, 1.0), (3.0, 4.0, 3.0)]


def timed(schedule, times):
    forward, into, weight = times
    return schedule.simulate(forward=forward, backward=into + weight, weight=weight)


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("times", TIMES)
def test_idle(stages, times):
    """(p - 1)(F + I + W) for 1F1B, (p - 1)(F + I - W) for H1, (p - 1)(F + I - 2 W) within a device for H2."""
    forward, into, weight = times
    for microbatches in (2 * stages, 2 * stages + 1, 4 * stages):
        sizes = {"stages": stages, "microbatches": microbatches}
        one = timed(schedules.one_f_one_b(**sizes), times)
        first = timed(schedules.zb_h1(**sizes), times)
        second = timed(schedules.zb_h2(**sizes), times)
        assert one.makespan - one.busy[0] == pytest.approx((stages - 1) * (forward + into + weight))
        assert first.makespan - first.busy[0] == pytest.approx((stages - 1) * (forward + into - weight))
        assert max(second.gaps) == pytest.approx((stages - 1) * (forward + into - 2 * weight))


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 6, 8])
def test_peaks(stages):
    """H1 and V have the peak of 1F1B, H2 nearly twice that."""
    for microbatches in (2 * stages, 2 * stages + 3, 5 * stages):
        sizes = {"stages": stages, "microbatches": microbatches}
        assert schedules.zb_h1(**sizes).simulate().peak_activations == (stages,) * stages
        assert schedules.zb_h2(**sizes).simulate().peak_activations == (2 * stages - 1,) * stages
        assert max(schedules.one_f_one_b(**sizes).simulate().peak_activations) == stages
        assert max(schedules.zb_v(**sizes).simulate().peak_activations) == stages
        assert schedules.dualpipe_v(**sizes).simulate().peak_activations == (stages + 0.5,) * stages


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 6, 8])
def test_peaks_of_few_microbatches(stages):
    for microbatches in range(1, 2 * stages):
        sizes = {"stages": stages, "microbatches": microbatches}
        assert schedules.zb_h1(**sizes).simulate().peak_activations == (min(stages, microbatches),) * stages
        assert schedules.zb_h2(**sizes).simulate().peak_activations == (min(2 * stages - 1, microbatches),) * stages


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 6, 8])
def test_no_bubble_in_the_v(stages):
    """With F = I = W no device idles between its first and last task; devices start half a unit apart."""
    for microbatches in (2 * stages - 1, 2 * stages, 3 * stages, 4 * stages + 1):
        simulation = schedules.zb_v(stages=stages, microbatches=microbatches).simulate(forward=1.0, backward=2.0)
        assert simulation.gaps == (0.0,) * stages
        assert simulation.makespan == 3 * microbatches + (stages - 1) / 2
        assert [starts[0] for starts in simulation.starts] == [device / 2 for device in range(stages)]


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 6, 8])
def test_dualpipe_v(stages):
    """With F = I = W the bubble is half a unit per further device."""
    for microbatches in (2 * stages, 2 * stages + 1, 5 * stages):
        simulation = schedules.dualpipe_v(stages=stages, microbatches=microbatches).simulate(forward=1.0, backward=2.0)
        assert simulation.idle == ((stages - 1) / 2,) * stages


def test_published_instances():
    sizes = {"stages": 4, "microbatches": 8}
    first = timed(schedules.zb_h1(**sizes), TIMES[0])
    assert (first.makespan, first.idle, first.peak_activations) == (27, (3,) * 4, (4,) * 4)
    assert first.bubble_fraction == pytest.approx(1 / 9)
    second = timed(schedules.zb_h2(**sizes), TIMES[0])
    assert [ends[-1] - starts[0] for starts, ends in zip(second.starts, second.ends, strict=True)] == [24] * 4
    assert (second.gaps, second.peak_activations) == ((0,) * 4, (7,) * 4)


@pytest.mark.parametrize("microbatches", [4, 8, 16, 32])
def test_rates_of_the_published_table(microbatches):
    """Bubble over busy time: (p - 1)/m, (p - 1)/(3 m), 0 and 0; peak activations 1, 1, 2 - 1/p and 1 times p."""
    sizes = {"stages": 2, "microbatches": microbatches}
    one, first, second, v = (
        timed(schedule(**sizes), TIMES[0])
        for schedule in (schedules.one_f_one_b, schedules.zb_h1, schedules.zb_h2, schedules.zb_v)
    )
    assert one.idle[0] / one.busy[0] == pytest.approx(1 / microbatches)
    assert first.idle[0] / first.busy[0] == pytest.approx(1 / (3 * microbatches))
    assert second.gaps == v.gaps == (0, 0)
    assert [max(each.peak_activations) for each in (one, first, second, v)] == [2, 2, 3, 2]


@pytest.mark.parametrize("schedule", [schedules.zb_v, schedules.dualpipe_v], ids=lambda f: f.__name__)
@pytest.mark.parametrize("stages", [2, 3, 5])
def test_few_microbatches_in_the_v(schedule, stages):
    """Too few microbatches to fill the pipeline are valid; the peak is at most their number, or the usual one."""
    for microbatches in range(1, 2 * stages):
        simulation = schedule(stages=stages, microbatches=microbatches).simulate()
        assert max(simulation.peak_activations) <= min(microbatches, stages + 0.5)


def test_both_arms_of_the_v_are_on_a_device():
    for schedule in (schedules.zb_v, schedules.dualpipe_v):
        assert schedule(stages=3, microbatches=6).placement == ((0, 5), (1, 4), (2, 3))


@pytest.mark.parametrize("name", ["zb_h1", "zb_h2", "zb_v", "dualpipe_v"])
def test_sizes_that_cannot_be(name):
    for sizes, words in (((0, 2), "stages=0"), ((2, 0), "microbatches=0")):
        with pytest.raises(ShardingError, match=f"schedules.{name}\n  found:    {words}"):
            getattr(schedules, name)(stages=sizes[0], microbatches=sizes[1])
