"""Auto-MAP's Q-learning: its targets, what it never takes, and what is no decision."""

import jax.numpy as jnp
import numpy as np
import pytest
from support.planning import five_nodes, random_problem

from sharding import planner
from sharding.planner import q_learning
from sharding.planner.q_learning import Learner, Remembered
from sharding.planner.strategy_scores import NUM_FEATURES, Weights


def test_targets_by_hand():
    weights = Weights(
        table=jnp.array([[9.0, 9, 9], [5, 2, 7]]),
        w1=jnp.zeros((NUM_FEATURES, 1)),
        w2=jnp.zeros(1),
    )
    features = np.zeros((3, 3, NUM_FEATURES), np.float32)
    batch = Remembered(
        node=np.array([0, 0, 1]),
        features=features,
        added=np.ones((3, 3), np.float32),
        taken=np.array([0, 1, 2]),
        cost=np.array([1.0, 3.0, 4.0], np.float32),
        next_node=np.array([1, 1, 0]),
        next_features=features,
        next_added=np.array([[0, 0, 0], [2, 0, 0], [0, 0, 0]], np.float32),
        next_options=np.array([[True, True, True], [True, False, True], [False, False, False]]),
    )
    assert q_learning.targets(weights, batch).tolist() == [1 + 2, 3 + 7, 4]


@pytest.mark.parametrize("seed", range(6))
def test_only_options_are_taken(seed):
    problem = random_problem(seed, nodes=8, forbidden=0.2)
    learner = Learner(problem, seed)
    for _ in range(20):
        learner.episode(1.0)
    for k in range(learner.num_decisions):
        assert learner.memory.taken[k] < problem.num_strategies[learner.memory.node[k]]
    assert learner.best is None or problem.is_feasible(learner.best)


def test_nothing_follows_the_last_decision_of_an_episode():
    learner = Learner(random_problem(3, nodes=8, forbidden=0.0), seed=0)
    learner.episode(1.0)
    follows = learner.memory.next_options[: learner.num_decisions].any(axis=1)
    assert follows.tolist() == [True] * (learner.num_decisions - 1) + [False]


def test_targets_of_several_steps_add_up_costs():
    """Of each episode of 13 decisions, two a target: the last target has one of them, and nothing follows two."""
    edges = [(i, i + 1, np.arange(9).reshape(3, 3)) for i in range(12)]
    problem = planner.Problem.of([[1, 2, 3]] * 13, edges)
    learner = Learner(problem, seed=0)
    assert (learner.num_free, learner.num_steps) == (13, 2)
    learner.episode(0.0)
    memory, count = learner.memory, learner.num_decisions
    assert count == 13
    assert memory.next_options[:count].any(axis=1).tolist() == [True] * 11 + [False] * 2
    assert memory.next_node[: count - 2].tolist() == memory.node[2:count].tolist()
    # Every other target covers all decisions once.
    assert memory.cost[:count:2].sum() * learner.scale == pytest.approx(problem.cost(learner.best))


def test_few_of_many_decisions_are_random(monkeypatch):
    learner = Learner(planner.Problem.of([[1, 2]] * 200), seed=0)
    shares = []
    taken = Learner._taken
    monkeypatch.setattr(Learner, "_taken", lambda self, d, share: shares.append(share) or taken(self, d, share))
    learner.episode(0.5)
    assert len(shares) == 200
    assert max(shares) == q_learning.RANDOM_DECISIONS / 200


def test_linked_nodes_are_no_decisions():
    linked = np.where(np.eye(3) > 0, 0, planner.FORBIDDEN)
    counts = []
    for length in (1, 5):
        # Each matmul is followed by elementwise ops, which take its sharding.
        edges = [(i, i + 1, linked if i % length else [[0, 1, 2], [2, 0, 1], [1, 2, 0]]) for i in range(1, 3 * length)]
        problem = planner.Problem.of([[1, 2, 3]] * (3 * length + 1), [(0, 1, linked), *edges])
        learner = Learner(problem, seed=0)
        learner.episode(1.0)
        counts.append(learner.num_decisions)
        assert planner.solve(problem, "dqn").cost == planner.solve(problem, "optcnn").cost
    assert counts == [3, 3]


def test_the_table_alone_learns_five_nodes(monkeypatch):
    monkeypatch.setattr(q_learning, "EPISODES", 150)
    assert planner.solve(five_nodes(), "dqn", seed=1).cost == 26


def test_equal_seeds_give_equal_choices(monkeypatch):
    monkeypatch.setattr(q_learning, "EPISODES", 20)
    problem = random_problem(5, nodes=10, limited=False, forbidden=0.0)
    first, second = (planner.solve(problem, "dqn", seed=3).choice for _ in range(2))
    assert first.tolist() == second.tolist()


def test_an_interrupt_returns_the_best_so_far(monkeypatch):
    episode = Learner.episode
    count = 0

    def interrupted(learner, share):
        nonlocal count
        count += 1
        if count == 4:
            raise KeyboardInterrupt
        episode(learner, share)

    monkeypatch.setattr(Learner, "episode", interrupted)
    assert planner.solve(five_nodes(), "dqn").evaluations == 4
