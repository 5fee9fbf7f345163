"""TensorOpt's frontier against that of all choices."""

import pytest
from support.planning import five_nodes, outcomes, plain_cost, plain_peak, random_problem

import sharding
from sharding import planner


def plain_frontier(problem):
    """(peak, cost) that no other choice is better than in both."""
    found = set(outcomes(problem))
    best = [
        (peak, cost)
        for cost, peak in found
        if peak <= problem.memory_bytes
        and not any(c <= cost and p <= peak and (c, p) != (cost, peak) for c, p in found)
    ]
    return sorted(best, reverse=True)


@pytest.mark.parametrize("seed", range(15))
def test_it_is_that_of_all_choices(seed):
    problem = random_problem(seed, nodes=6, limited=seed % 3 == 0)
    expected = plain_frontier(problem)
    if not expected:
        with pytest.raises(sharding.ShardingError, match="every choice is forbidden"):
            planner.frontier(problem)
        return
    points = planner.frontier(problem)
    assert [(point.peak_bytes, point.cost) for point in points] == expected
    for point in points:
        choice = tuple(point.choice.tolist())
        assert (plain_peak(problem, choice), plain_cost(problem, choice)) == (point.peak_bytes, point.cost)


def test_a_chain():
    points = planner.frontier(five_nodes(is_chain=True))
    assert [(point.peak_bytes, point.cost) for point in points] == [
        (18, 24),
        (15, 26),
        (13, 29),
        (12, 30),
        (9, 33),
        (8, 46),
    ]


def test_too_many_points_are_refused(monkeypatch):
    from sharding.planner import pareto_frontier

    monkeypatch.setattr(pareto_frontier, "MOST_POINTS", 20)
    with pytest.raises(sharding.ShardingError, match="at most 20 in one table"):
        planner.frontier(five_nodes())
