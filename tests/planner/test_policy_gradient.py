"""REINFORCE: its gradient against the exact one, its samples against the problem, and what it learns."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.planning import five_nodes, random_problem

import sharding
from sharding import planner
from sharding.planner import policy_gradient
from sharding.planner.strategy_scores import initial_weights

sample = jax.jit(jax.vmap(policy_gradient.sample, in_axes=(None, None, 0)))


def weights_of(tables, seed=0):
    weights = initial_weights(jax.random.key(seed), *tables.costs.shape)
    table = np.random.default_rng(seed).normal(size=weights.table.shape)
    # Without the network the policy is a table, whose probabilities can be written out.
    return weights._replace(table=jnp.asarray(table, jnp.float32), w2=jnp.zeros_like(weights.w2))


def test_the_gradient_is_unbiased(monkeypatch):
    monkeypatch.setattr(policy_gradient, "SAMPLES", 5_000)
    problem = planner.Problem.of([[0, 3], [2, 0, 1]], [(0, 1, [[0, 5, 2], [5, 0, 1]])])
    tables, order, scale, bound = policy_gradient._padded(problem)
    weights = weights_of(tables)

    def expected(table):
        total = 0.0
        for choice in itertools.product(range(2), range(3)):
            logs = [jax.nn.log_softmax(table[at, : (2, 3)[node]])[choice[node]] for at, node in enumerate(order)]
            total += jnp.exp(sum(logs)) * np.sqrt((problem.cost(choice) - bound) / scale)
        return total

    slope = jax.jit(jax.grad(expected))(weights.table)
    gradient = jax.jit(jax.grad(policy_gradient.surrogate, has_aux=True))
    for baseline in (0.0, 1.0):
        estimate, _ = gradient(weights, tables, jnp.float32(baseline), jax.random.key(1), False)
        assert np.allclose(estimate.table, slope, atol=0.04)
    assert np.abs(slope).max() > 0.05


def test_a_baseline_lowers_the_variance(monkeypatch):
    monkeypatch.setattr(policy_gradient, "SAMPLES", 4)
    tables = policy_gradient._padded(five_nodes()).tables
    weights = weights_of(tables)
    gradient = jax.jit(jax.grad(policy_gradient.surrogate, has_aux=True))

    def spread(baseline):
        keys = jax.random.split(jax.random.key(2), 60)
        found = [gradient(weights, tables, jnp.float32(baseline), key, False)[0].table for key in keys]
        return float(np.stack(found).var(axis=0).sum())

    assert spread(2.0) < 0.5 * spread(0.0)


@pytest.mark.parametrize("seed", range(8))
def test_samples_cost_what_the_problem_says(seed):
    problem = random_problem(seed, nodes=8, forbidden=0.1)
    tables, order, scale, bound = policy_gradient._padded(problem)
    keys = jax.random.split(jax.random.key(seed), 16)
    sampled = sample(tables, weights_of(tables), keys)
    for row, cost in zip(np.asarray(sampled.choices), np.asarray(sampled.costs), strict=True):
        choice = np.zeros(problem.num_nodes, np.int64)
        choice[order] = row[: problem.num_nodes]
        assert problem.peak_bytes(choice) <= problem.memory_bytes
        if cost < policy_gradient.DEAD:
            assert np.isclose(bound + scale * cost, problem.cost(choice), rtol=1e-5)
        else:
            assert problem.cost(choice) >= planner.FORBIDDEN


def test_costly_communication_keeps_one_device(monkeypatch):
    monkeypatch.setattr(policy_gradient, "STEPS", 60)
    apart = 50 * (1 - np.eye(3))
    problem = planner.Problem.of([[3, 2, 3]] * 6, [(i, i + 1, apart) for i in range(5)])
    assert planner.solve(problem, "reinforce").choice.tolist() == [1] * 6


def test_equal_seeds_give_equal_choices(monkeypatch):
    monkeypatch.setattr(policy_gradient, "STEPS", 3)
    problem = random_problem(5, nodes=10, limited=False, forbidden=0.0)
    first, second = (planner.solve(problem, "reinforce", seed=3).choice for _ in range(2))
    assert first.tolist() == second.tolist()


def test_what_is_too_large_is_refused(monkeypatch):
    monkeypatch.setattr(policy_gradient, "MOST_ENTRIES", 1000)
    with pytest.raises(sharding.ShardingError, match="4,096 entries of padded edges"):
        planner.solve(five_nodes(), "reinforce")
