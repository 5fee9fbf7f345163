"""Problems: evaluation against the obvious one, files, and errors that name what is wrong."""

import gzip
import itertools
import json

import numpy as np
import pytest
from support.planning import five_nodes, plain_cost, plain_peak, random_problem

import sharding
from sharding import planner

EXAMPLE = {
    "problem": {
        "name": "small",
        "nodes": {"intervals": [[3, 7], [4, 9]], "costs": [[15], [55, 65]], "usages": [[10], [25, 20]]},
        "edges": {"nodes": [[0, 1]], "costs": [[30, 40]]},
        "usage_limit": 34,
    }
}


@pytest.mark.parametrize("seed", range(20))
def test_cost_and_peak_are_those_of_the_definition(seed):
    problem = random_problem(seed, nodes=5)
    for choice in itertools.product(*(range(len(cost)) for cost in problem.costs)):
        expected = plain_cost(problem, choice)
        assert problem.cost(choice) == expected or expected >= planner.FORBIDDEN <= problem.cost(choice)
        assert problem.peak_bytes(choice) == plain_peak(problem, choice)


def test_only_times_that_no_other_time_contains_count():
    problem = planner.Problem.of([[0]] * 4, usages=[[1]] * 4, intervals=[(0, 10), (2, 5), (4, 8), (9, 9)])
    assert problem.times.tolist() == [4]
    assert problem.peak_bytes([0] * 4) == 3


@pytest.mark.parametrize("name", ["problem.json", "problem.json.gz"])
def test_a_written_problem_is_read_back(tmp_path, name):
    problem = random_problem(3)
    problem.write(tmp_path / name)
    again = planner.read(tmp_path / name)
    assert repr(again) == repr(problem)
    for ours, theirs in ((problem.costs, again.costs), (problem.usages, again.usages)):
        assert all(map(np.array_equal, ours, theirs))
    assert all(map(np.array_equal, problem.edge_costs, again.edge_costs))
    assert np.array_equal(problem.intervals, again.intervals)
    assert np.array_equal(problem.edges, again.edges)
    again.write(tmp_path / f"again-{name}")
    assert (tmp_path / f"again-{name}").read_bytes() == (tmp_path / name).read_bytes()


def test_the_contest_format_is_read(tmp_path):
    (tmp_path / "small.json.gz").write_bytes(gzip.compress(json.dumps(EXAMPLE).encode()))
    problem = planner.read(tmp_path / "small.json.gz")
    assert problem.memory_bytes == 34
    assert problem.cost([0, 1]) == 15 + 65 + 40
    assert problem.peak_bytes([0, 1]) == 30


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("nodes",), None, "no key 'nodes'"),
        (("nodes", "usages"), [[10], [25]], "1 usages, 2 costs"),
        (("nodes", "usages"), [[10], [25, -1]], "no negative bytes"),
        (("nodes", "usages"), [[10]], "1 for 2 nodes"),
        (("nodes", "intervals"), [[3, 7]], "1 for 2 nodes"),
        (("nodes", "costs"), [[1, 2], [1, 2]], "has 2 numbers, not 2 x 2"),
        (("edges", "nodes"), [[0, 2]], "not two nodes below 2"),
        (("edges", "nodes"), [[0, 1, 1]], "not two nodes below 2"),
        (("edges", "nodes"), [], "0 pairs of nodes, 1 lists of costs"),
        (("edges", "costs"), [[1, 2, 3]], "has 3 numbers, not 1 x 2"),
        (("usage_limit",), 0, "a positive number of bytes"),
    ],
)
def test_a_malformed_file_names_what_is_wrong(tmp_path, path, value, message):
    content = json.loads(json.dumps(EXAMPLE))
    place = content["problem"]
    for key in path[:-1]:
        place = place[key]
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    (tmp_path / "bad.json").write_text(json.dumps(content))
    with pytest.raises(sharding.ShardingError, match=message):
        planner.read(tmp_path / "bad.json")


@pytest.mark.parametrize("data", [b"{", b"\x1f\x8b broken", None])
def test_a_file_that_is_no_json_is_an_error(tmp_path, data):
    if data is not None:
        (tmp_path / "bad.json").write_bytes(data)
    with pytest.raises(sharding.ShardingError, match="a JSON file"):
        planner.read(tmp_path / "bad.json")


def test_all_failures_of_a_problem_are_reported_together():
    with pytest.raises(sharding.ShardingError, match="2 failures") as error:
        planner.Problem.of([[1.0], [1.0, np.nan]], [(0, 1, [[1.0]])])
    assert "costs[1]" in str(error.value)
    assert "1 x 2, the strategies of nodes 0 and 1" in str(error.value)


@pytest.mark.parametrize("choice", [[0, 0, 0, 0], [0, 0, 0, 0, 3], [0, 0, 0, 0, -1]])
def test_a_choice_needs_a_strategy_per_node(choice):
    with pytest.raises(sharding.ShardingError, match="one index of a strategy per node"):
        five_nodes().cost(choice)


@pytest.mark.parametrize("limit", [0, -1, 7])
def test_a_limit_below_every_peak_says_the_smallest(limit):
    with pytest.raises(sharding.ShardingError, match="memory_bytes=8 or more"):
        five_nodes().limited(limit)
    assert five_nodes().limited(8).memory_bytes == 8


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ([[[0], [-1]]], "1 for 2 nodes"),
        ([[[0], [-1]], [[0]]], r"splits\[1\]\n.*shape \(1, 1\)"),
        ([[[0], [-1]], [[0, 1], [0, -1]]], r"shape \(2, 2\)"),
        ([[0, -1], [0, -1]], "2 strategies x mesh axes"),
        ([[[0], [-1]], [[0], [-2]]], "indices of factors, or -1 for none"),
    ],
)
def test_splits_have_a_row_per_strategy(splits, message):
    with pytest.raises(sharding.ShardingError, match=message):
        planner.Problem.of([[1, 2], [3, 4]], splits=splits)


def test_splits_stay_with_another_limit():
    problem = planner.Problem.of([[1, 2]], usages=[[4, 2]], splits=[[[0, -1], [-1, 0]]])
    assert problem.limited(3).splits[0].tolist() == [[0, -1], [-1, 0]]
    assert planner.Problem.of([[1, 2]]).splits == ()
