"""DAPPLE's planner against exhaustive search over stages, devices and placements."""

import itertools
import math
import random

import pytest

from sharding.errors import ShardingError
from sharding.pipeline import schedules
from sharding.pipeline.cutting import POLICIES, Machines, Phase, dapple, latency
from sharding.pipeline.cutting.communication_times import all_reduce_time_per_byte, transfer_time_per_byte
from sharding.pipeline.cutting.dapple_planner import _Plan
from sharding.pipeline.cutting.stage_placement import place

FREE = {"inside": math.inf, "between": math.inf}


def parts(total, count):
    """All compositions of `total` into `count` positive integers."""
    for cuts in itertools.combinations(range(1, total), count - 1):
        yield [end - begin for begin, end in itertools.pairwise([0, *cuts, total])]


def placements(machines, counts, policies=POLICIES):
    """All placements of stages with these numbers of devices, assigned in order."""
    for each in itertools.product(policies, repeat=len(counts)):
        used, stages = [0] * machines.machines, []
        for policy, count in zip(each, counts, strict=True):
            stages.append(place(policy, machines, used, count))
            for device in stages[-1]:
                used[device // machines.devices] += 1
        yield tuple(stages)


def plan_latency(forward, backward, activation_bytes, weight_bytes, machines, sizes, devices, microbatches):
    """The latency of one plan, with transfers as stages of their own."""
    phases, begin = [], 0
    for number, (size, mine) in enumerate(zip(sizes, devices, strict=True)):
        if number:
            transfer = activation_bytes[begin - 1] * transfer_time_per_byte(machines, devices[number - 1], mine)
            phases.append((transfer, transfer))
        layers = slice(begin, begin + size)
        all_reduce = sum(weight_bytes[layers]) * all_reduce_time_per_byte(machines, mine)
        phases.append((sum(forward[layers]) / len(mine), sum(backward[layers]) / len(mine), all_reduce))
        begin += size
    return latency(phases, microbatches=microbatches).total


def least_latency(lists, machines, microbatches, policies):
    return min(
        plan_latency(*lists, machines, sizes, devices, microbatches)
        for stages in range(1, min(len(lists[0]), machines.total) + 1)
        for sizes in parts(len(lists[0]), stages)
        for counts in parts(machines.total, stages)
        for devices in set(placements(machines, counts, policies))
    )


def found_and_least(numbers, layers, machines, heaviest, policies=POLICIES):
    lists = [[numbers.randint(0, most) for _ in range(layers)] for most in (5, 9, numbers.choice([9, 60]), heaviest)]
    microbatches = numbers.randint(1, 12)
    names = ("backward", "activation_bytes", "weight_bytes")
    rest = dict(zip(names, lists[1:], strict=True))
    plan = dapple(lists[0], **rest, machines=machines, microbatches=microbatches, policies=policies)
    assert sum(plan.sizes) == layers
    assert sorted(itertools.chain(*plan.devices)) == list(range(machines.total))
    own = plan_latency(*lists, machines, plan.sizes, plan.devices, microbatches)
    assert plan.latency.total == pytest.approx(own)
    return plan, least_latency(lists, machines, microbatches, policies)


@pytest.mark.parametrize(("count", "devices"), [(1, 4), (2, 2), (4, 1), (3, 1), (1, 3)])
def test_least_of_all(count, devices):
    numbers = random.Random(f"{count} {devices}")
    for _ in range(25):
        machines = Machines(
            machines=count, devices=devices, inside=numbers.randint(1, 20), between=numbers.randint(1, 20)
        )
        layers, heaviest = numbers.randint(1, 6), numbers.choice([9, 99, 400])
        plan, least = found_and_least(numbers, layers, machines, heaviest)
        assert plan.latency.total == pytest.approx(least)


def test_a_dominating_plan_stays_ahead_with_any_later_stages():
    numbers = random.Random("later")

    def phases(most):
        for _ in range(numbers.randint(1, 3)):
            yield Phase(numbers.randint(0, most), numbers.randint(0, most), numbers.choice([0, numbers.randint(0, 30)]))

    beaten = 0
    for _ in range(6000):
        microbatches = numbers.randint(1, 4)
        one, other = (_following(_Plan(), phases(4), microbatches) for _ in range(2))
        later = list(phases(6))
        if one.dominates(other):
            beaten += 1
            totals = [_following(plan, later, microbatches).total for plan in (one, other)]
            assert totals[0] <= totals[1]
    assert beaten > 100


def _following(plan, phases, microbatches):
    for phase in phases:
        plan = plan.extend(phase, microbatches)
    return plan


def test_incremental_latency_equals_latency():
    numbers = random.Random("whole")
    for _ in range(200):
        phases = [Phase(*(numbers.randint(0, most) for most in (5, 5, 40))) for _ in range(numbers.randint(1, 6))]
        assert _following(_Plan(), phases, 5).total == latency(phases, microbatches=5).total


@pytest.mark.parametrize("policy", POLICIES)
def test_least_of_all_by_one_policy(policy):
    numbers = random.Random("one policy")
    machines = Machines(machines=2, devices=2, inside=20, between=2)
    for _ in range(15):
        plan, least = found_and_least(numbers, 4, machines, 99, [policy])
        assert plan.latency.total == pytest.approx(least)


def test_least_of_all_on_three_machines():
    numbers = random.Random("three")
    machines = Machines(machines=3, devices=2, inside=20, between=3)
    for _ in range(3):
        plan, least = found_and_least(numbers, 4, machines, 200)
        assert plan.latency.total == pytest.approx(least)


def test_free_links_leave_no_reason_for_a_pipeline():
    machines = Machines(machines=2, devices=2, **FREE)
    plan = dapple(
        [1] * 4, backward=[2] * 4, activation_bytes=[5] * 4, weight_bytes=[5] * 4, machines=machines, microbatches=4
    )
    assert (plan.sizes, plan.replicas, plan.latency.total) == ((4,), (4,), 12)


def test_heavy_weights_make_a_straight_pipeline():
    """Without transfers the latency is that of policy B's schedule: 33 for four stages and eight microbatches."""
    machines = Machines(machines=1, devices=4, inside=1, between=1)
    plan = dapple(
        [0.5] * 8, backward=[1] * 8, activation_bytes=[0] * 8, weight_bytes=[1e3] * 8, machines=machines, microbatches=8
    )
    assert (plan.sizes, plan.replicas, plan.latency.total) == ((2, 2, 2, 2), (1, 1, 1, 1), 33)
    schedule = schedules.dapple(stages=4, microbatches=8, policy="B")
    stages = plan.phases[::2]
    taken = schedule.simulate(forward=[one.forward for one in stages], backward=[one.backward for one in stages])
    assert taken.makespan == plan.latency.total


def test_one_machine_each_where_links_between_them_are_slow():
    """Gradients are all-reduced over fast links; only one layer's activations cross the slow one."""
    machines = Machines(machines=2, devices=4, inside=1000, between=1)
    plan = dapple(
        [4] * 4,
        backward=[8] * 4,
        activation_bytes=[1, 0.5, 1, 0],
        weight_bytes=[100] * 4,
        machines=machines,
        microbatches=8,
    )
    assert plan.devices == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert plan.sizes == (2, 2)
    assert plan.layers == (range(2), range(2, 4))


def test_scattered_where_activations_are_large():
    """Equal numbers of devices on both machines keep activations local; a single stage would all-reduce all weights."""
    machines = Machines(machines=2, devices=2, inside=1e6, between=1)
    plan = dapple(
        [2, 2], backward=[4, 4], activation_bytes=[1000, 0], weight_bytes=[5, 5], machines=machines, microbatches=16
    )
    assert plan.devices == ((0, 2), (1, 3))
    assert plan.latency.total == pytest.approx(17 * 3 + 5, rel=1e-3)


def test_the_same_plan_again():
    numbers = random.Random("again")
    arguments = {
        name: [numbers.uniform(1, 9) for _ in range(10)] for name in ("backward", "activation_bytes", "weight_bytes")
    }
    machines = Machines(machines=2, devices=3, inside=5, between=1)
    first, again = (dapple([1] * 10, **arguments, machines=machines, microbatches=6) for _ in range(2))
    assert first == again


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"forward": []}, "no layers"),
        ({"backward": [1]}, r"forward has 2 numbers\n +backward has 1 numbers"),
        ({"weight_bytes": [1, -1]}, r"weight_bytes\[1\]\)\n  found:    -1"),
        ({"microbatches": 0}, "microbatches=0"),
        ({"policies": ["first"]}, r"policies\)\n  found:    \['first'\]"),
        ({"policies": ()}, r"policies\)[\s\S]*a non-empty subset of"),
    ],
)
def test_what_cannot_be_planned(change, words):
    lists = {"forward": [1, 1], "backward": [2, 2], "activation_bytes": [1, 1], "weight_bytes": [1, 1]}
    arguments = {**lists, "machines": Machines(machines=1, devices=2, **FREE), "microbatches": 4, **change}
    with pytest.raises(ShardingError, match=words):
        dapple(arguments.pop("forward"), **arguments)
