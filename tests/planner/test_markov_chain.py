"""FlexFlow's chain: changes by delta are those of full evaluation, and the acceptance rate is Metropolis'."""

import numpy as np
import pytest
from support.planning import five_nodes, random_problem

from sharding.planner.markov_chain import Chain


@pytest.mark.parametrize("seed", range(5))
def test_delta_and_full_evaluation_agree(seed):
    problem = random_problem(seed, nodes=9, forbidden=0.0)
    rng = np.random.default_rng(seed)
    chain = Chain(problem, np.zeros(problem.num_nodes, np.int64))
    for _ in range(300):
        node = int(rng.integers(problem.num_nodes))
        strategy = int(rng.integers(problem.num_strategies[node]))
        excess = chain.excess_after(node, strategy)
        chain.move(node, strategy)
        assert chain.cost == problem.cost(chain.choice)
        assert chain.memory.tolist() == problem.memory_over_time(chain.choice).tolist()
        assert excess == max(0.0, problem.peak_bytes(chain.choice) - problem.memory_bytes)


def test_a_move_looks_at_the_edges_of_one_node():
    chain = Chain(five_nodes(), np.zeros(5, np.int64))
    assert [len(edges) for edges in chain.edges] == [2, 3, 3, 2, 2]
