"""GPipe, 1F1B and DAPPLE against their closed forms, and DAPPLE's latency formula against its schedules."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharding.errors import ShardingError
from sharding.pipeline import schedules

SIZES = [(stages, microbatches) for stages in (1, 2, 3, 4, 7) for microbatches in (1, 2, 3, 4, 8, 16)]
TIMES = st.tuples(st.integers(1, 5), st.integers(1, 9))


@pytest.mark.parametrize(
    "schedule", [schedules.gpipe, schedules.one_f_one_b, schedules.eager_1f1b], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("backward", [1.0, 2.0])
def test_makespan_and_bubbles(schedule, backward):
    """The makespan is (M + K - 1)(F + B), with a bubble fraction of (K - 1)/(M + K - 1)."""
    for stages, microbatches in SIZES:
        simulation = schedule(stages=stages, microbatches=microbatches).simulate(forward=1.0, backward=backward)
        assert simulation.makespan == (microbatches + stages - 1) * (1 + backward)
        assert simulation.bubble_fraction == pytest.approx((stages - 1) / (microbatches + stages - 1))
        assert simulation.idle == ((stages - 1) * (1 + backward),) * stages


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 8), st.integers(1, 20), TIMES)
def test_peaks_and_versions(stages, microbatches, times):
    peaks = {
        schedules.gpipe: [microbatches] * stages,
        schedules.one_f_one_b: [min(stages - s, microbatches) for s in range(stages)],
        schedules.eager_1f1b: [min(2 * (stages - s) - 1, microbatches) for s in range(stages)],
    }
    for schedule, peak in peaks.items():
        simulation = schedule(stages=stages, microbatches=microbatches).simulate(forward=times[0], backward=times[1])
        assert simulation.peak_activations == tuple(peak)
        assert simulation.weight_versions == (1,) * stages
        assert simulation.staleness == (0,) * stages


def test_published_instances():
    gpipe = schedules.gpipe(stages=4, microbatches=4).simulate(forward=1.0, backward=1.0)
    assert (gpipe.makespan, gpipe.idle, gpipe.bubble_fraction) == (14, (6,) * 4, pytest.approx(3 / 7))
    gpipe = schedules.gpipe(stages=4, microbatches=8).simulate(forward=1.0, backward=2.0)
    assert (gpipe.makespan, gpipe.peak_activations) == (33, (8,) * 4)
    assert gpipe.bubble_fraction == pytest.approx(3 / 11)
    one = schedules.one_f_one_b(stages=4, microbatches=8).simulate(forward=1.0, backward=2.0)
    assert (one.makespan, one.idle, one.peak_activations) == (33, (9,) * 4, (4, 3, 2, 1))


@pytest.mark.parametrize("stages", range(1, 9))
def test_four_microbatches_a_stage_leave_few_bubbles(stages):
    simulation = schedules.gpipe(stages=stages, microbatches=4 * stages).simulate()
    assert simulation.bubble_fraction == pytest.approx((stages - 1) / (5 * stages - 1))
    assert simulation.bubble_fraction < 0.2


def test_gpipe_goes_backward_from_the_last():
    assert [task.label for task in schedules.gpipe(stages=2, microbatches=3).orders[0]] == "F0 F1 F2 B2 B1 B0".split()


@pytest.mark.parametrize(
    ("policy", "schedule"), [("A", schedules.one_f_one_b), ("B", schedules.eager_1f1b)], ids=["A", "B"]
)
def test_policies_of_dapple(policy, schedule):
    for stages, microbatches in SIZES:
        sizes = {"stages": stages, "microbatches": microbatches}
        assert schedules.dapple(**sizes, policy=policy).orders == schedule(**sizes).orders


@pytest.mark.parametrize("most", [1, 2, 3, 9])
@pytest.mark.parametrize("policy", ["A", "B"])
def test_dapple_respects_the_memory_limit(policy, most):
    simulation = schedules.dapple(stages=4, microbatches=8, policy=policy, most_in_flight=most).simulate()
    ahead = [4 - s if policy == "A" else 7 - 2 * s for s in range(4)]
    assert simulation.peak_activations == tuple(min(count, most) for count in ahead)


def latency(forward, backward, microbatches):
    """DAPPLE's T_w + T_s + T_e with its pivot stage, without communication and all-reduce."""
    stages = len(forward)
    both = [f + b for f, b in zip(forward, backward, strict=True)]
    pivot = stages - 1
    for s in reversed(range(stages - 1)):
        if (microbatches - 1) * both[s] > (microbatches - 1) * both[pivot] + sum(both[s + 1 : pivot]):
            pivot = s
    ends = [sum(backward[s : pivot + 1]) if s <= pivot else -sum(backward[pivot + 1 : s + 1]) for s in range(stages)]
    return sum(forward[: pivot + 1]) + (microbatches - 1) * both[pivot] + max(ends)


def simulated(forward, microbatches, policy):
    schedule = schedules.dapple(stages=len(forward), microbatches=microbatches, policy=policy)
    return schedule.simulate(forward=forward, backward=[2 * f for f in forward]).makespan


@pytest.mark.parametrize(("stages", "microbatches", "makespan"), [(4, 8, 33), (4, 4, 21), (8, 32, 117)])
def test_latency_of_even_stages(stages, microbatches, makespan):
    for policy in ("A", "B"):
        assert simulated([1] * stages, microbatches, policy) == makespan
    assert latency([1] * stages, [2] * stages, microbatches) == makespan


@pytest.mark.parametrize(
    ("forward", "by_formula", "by_a", "by_b"),
    [
        ([2, 2, 1, 2], 111, 111, 111),
        ([2, 2, 3, 1], 156, 156, 156),
        ([1, 3, 2, 3], 162, 162, 162),
        ([3, 2, 2, 2], 144, 153, 144),
    ],
)
def test_latency_of_uneven_stages(forward, by_formula, by_a, by_b):
    assert latency(forward, [2 * f for f in forward], 16) == by_formula
    assert simulated(forward, 16, "A") == by_a
    assert simulated(forward, 16, "B") == by_b


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=2, max_size=5))
def test_latency_is_that_of_policy_b(forward):
    """Holds unless a stage is so much faster than its neighbours that its warm-up is too short."""
    assert latency(forward, [2 * f for f in forward], 16) == simulated(forward, 16, "B")


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=5))
def test_latency_is_never_above_the_schedules(forward):
    formula = latency(forward, [2 * f for f in forward], 16)
    assert formula <= simulated(forward, 16, "A")
    assert formula <= simulated(forward, 16, "B")


def test_latency_ignores_a_bubble_at_the_start():
    """Stage 0 finishes its three warm-up forwards at 12 and waits for the first backward, available at 4 + 3 + 6."""
    assert latency([4, 3], [8, 6], 16) == 192
    assert simulated([4, 3], 16, "B") == 193


def test_eager_hides_slow_links():
    one, eager = (
        f(stages=4, microbatches=16).simulate(send=1.0) for f in (schedules.one_f_one_b, schedules.eager_1f1b)
    )
    assert eager.makespan < one.makespan


@pytest.mark.parametrize(
    ("schedule", "arguments", "words"),
    [
        (schedules.gpipe, {"stages": 0, "microbatches": 1}, "schedules.gpipe\n  found:    stages=0"),
        (schedules.gpipe, {"stages": 1, "microbatches": -3}, "microbatches=-3"),
        (schedules.one_f_one_b, {"stages": 2, "microbatches": 0}, "microbatches=0"),
        (schedules.one_f_one_b, {"stages": 2.0, "microbatches": 4}, "stages=2.0"),
        (schedules.eager_1f1b, {"stages": True, "microbatches": 4}, "stages=True"),
        (schedules.dapple, {"stages": 2, "microbatches": 4, "most_in_flight": 0}, "most_in_flight=0"),
        (schedules.dapple, {"stages": 2, "microbatches": 4, "policy": "C"}, "'C'\n  required: 'A' or 'B'"),
    ],
)
def test_sizes_that_cannot_be(schedule, arguments, words):
    with pytest.raises(ShardingError, match=re.escape(words)):
        schedule(**arguments)
