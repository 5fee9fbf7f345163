"""FlexFlow's Markov chain Monte Carlo: change a node at random, accept what costs more with falling probability."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence

import numpy as np

from .problem import FORBIDDEN, Problem
from .solution import Solution, nothing_found

PROPOSALS = 1_000_000
"""Of all chains, after which the search ends, if not by time."""
CHAINS = 5
"""The first starts from each node's cheapest strategy, the others from random ones."""
COLDEST = 0.01
"""The last temperature of a chain, as part of the first."""
PROPAGATED, CONTINUED = 0.25, 0.75
"""Part of the proposals that neighbours follow, and the chance of one more neighbour; both as released."""
PENALTY = 2.0
"""Price of memory above the limit: of the whole limit, per node, as a multiple of the first temperature."""
MEASURED = 10_000
"""Most changes of one node by which the first temperature is measured."""


class Chain:
    """A choice, its cost and its memory over time, changed one node at a time."""

    def __init__(self, problem: Problem, choice: Sequence[int] | np.ndarray):
        self.problem = problem
        self.edges: list[list[tuple[int, np.ndarray]]] = [[] for _ in range(problem.num_nodes)]
        for (i, j), matrix in zip(problem.edges.tolist(), problem.edge_costs, strict=True):
            self.edges[i].append((j, matrix))
            self.edges[j].append((i, matrix.T))
        # Single entries of arrays are read several times as fast by a bound `item`.
        self._costs = [cost.item for cost in problem.costs]
        self._edge_costs = [[(j, matrix.item) for j, matrix in own] for own in self.edges]
        self._follows: dict[tuple[int, int], list[int]] = {}
        self.is_tight = bool(problem.is_tight.any())
        """Whether some choice exceeds the limit."""
        self.restart(choice)

    def restart(self, choice: Sequence[int] | np.ndarray) -> None:
        """Takes another choice."""
        self.choice = [int(strategy) for strategy in choice]
        self.cost = self.problem.cost(self.choice)
        self.memory = self.problem.memory_over_time(self.choice)
        """Followed only if some choice exceeds the limit."""
        self.excess = max(0.0, float(self.memory.max(initial=0.0)) - self.problem.memory_bytes)

    def delta(self, node: int, strategy: int) -> float:
        """By how much the cost changes if a node takes another strategy, from that node's edges alone."""
        choice, own = self.choice, self._costs[node]
        old = choice[node]
        total = own(strategy) - own(old)
        for j, costs in self._edge_costs[node]:
            total += costs(strategy, choice[j]) - costs(old, choice[j])
        return total

    def excess_after(self, node: int, strategy: int) -> float:
        """The bytes above the limit at the worst time if a node takes another strategy."""
        if not self.is_tight:
            return 0.0
        usage, (first, end) = self.problem.usages[node], self.problem.spans[node]
        memory = self.memory.copy()
        memory[first:end] += usage[strategy] - usage[self.choice[node]]
        return max(0.0, float(memory.max(initial=0.0)) - self.problem.memory_bytes)

    def move(self, node: int, strategy: int) -> None:
        """Gives a node another strategy."""
        change = self.delta(node, strategy)
        if self.is_tight:
            usage, (first, end) = self.problem.usages[node], self.problem.spans[node]
            self.memory[first:end] += usage[strategy] - usage[self.choice[node]]
            self.excess = max(0.0, float(self.memory.max(initial=0.0)) - self.problem.memory_bytes)
        self.choice[node] = strategy
        # Sums with forbidden costs lose digits.
        self.cost = self.cost + change if abs(change) < FORBIDDEN / 2 else self.problem.cost(self.choice)

    def following(self, node: int, place: int) -> tuple[int, int]:
        """A neighbour, by its place among the edges, and the strategy in which it goes best with a node's."""
        j, matrix = self.edges[node][place]
        if (node, place) not in self._follows:
            self._follows[node, place] = (matrix + self.problem.costs[j]).argmin(axis=1).tolist()
        return j, self._follows[node, place][self.choice[node]]


def solve(problem: Problem, *, memory_bytes: float | None = None, seconds: float = 60, seed: int = 0) -> Solution:
    """A cheap choice by Metropolis-Hastings from several initial choices.

    A random node proposes a random strategy. With the chance of `PROPAGATED` a neighbour takes the strategy that goes
    best with it, with that of `CONTINUED` one of its neighbours follows, and so on: one node alone rarely leaves a
    group whose nodes pay for being sharded differently. The whole change is accepted with probability
    `min(1, exp(-increase / temperature))`; the increase has a price for memory above the limit. The temperature falls
    from the mean increase by one node near a local minimum to its `COLDEST` part. Each chain starts and ends at a local
    minimum.

    Raises:
        ShardingError: no choice that fits was found.

    References:
        Jia, Zaharia, Aiken, "Beyond Data and Model Parallelism for Deep Neural Networks", MLSys 2019, section 6: 6.1
        for the acceptance, 6.2 for several initial choices; propagation as in the released `FFModel::propagate`.
        Deviation: the cost is the problem's sum, not a simulated makespan; the temperature falls; memory has a price;
        a neighbour takes what costs least, as strategies of different nodes have no names in common.
    """
    problem, start = problem.limited(memory_bytes), time.monotonic()
    search = Annealing(problem, seed, start + seconds)
    try:
        for k in range(CHAINS):
            search.run(PROPOSALS // CHAINS, is_random=k > 0)
    except KeyboardInterrupt:
        if search.best is None:
            raise
    if search.best is None:
        raise nothing_found(problem, "flexflow", is_proven=False)
    return Solution(
        problem=problem,
        choice=np.array(search.best, np.int64),
        algorithm="flexflow",
        bound=-math.inf,
        evaluations=search.proposals,
        seconds=time.monotonic() - start,
    )


class Annealing:
    """Chains that run one after the other, and the best choice that they met.

    Args:
        problem: what to solve.
        seed: of proposals.
        until: a time of `time.monotonic`.
    """

    def __init__(self, problem: Problem, seed: int, until: float):
        self.problem, self.until = problem, until
        self.random = random.Random(seed)
        self.counts = problem.num_strategies.tolist()
        self.free = [node for node, count in enumerate(self.counts) if count > 1]
        self.cheapest = [int(cost.argmin()) for cost in problem.costs]
        self.chain = Chain(problem, self.cheapest)
        self.proposals = 0
        self.best: list[int] | None = None
        self.best_cost = math.inf
        self.note()
        # What memory costs follows from the temperature, which is measured where changes of one node save nothing.
        self.heat, self.price = 1.0, 0.0
        self._measure()
        self.descend()
        self._measure()

    def run(self, proposals: int, *, is_random: bool) -> None:
        """Anneals a chain, from random or each node's cheapest strategies, until its end or that of time."""
        start = [self._below(count) for count in self.counts] if is_random else self.cheapest
        self.chain.restart(start)
        self.descend()
        for k in range(proposals if self.free else 0):
            if time.monotonic() > self.until:
                return
            self.propose(self.heat * COLDEST ** (k / proposals))
            self.proposals += 1
        self.descend()

    def propose(self, temperature: float) -> None:
        """Proposes a strategy of a node, maybe with some neighbours', and takes it or not."""
        chain = self.chain
        node = self.free[self._below(len(self.free))]
        strategy = self._below(self.counts[node])
        if strategy == chain.choice[node]:
            return
        allowed = -temperature * math.log(1.0 - self.random.random())
        if not chain.edges[node] or self.random.random() >= PROPAGATED:
            if chain.delta(node, strategy) <= allowed or chain.excess:
                if self.increase(node, strategy) <= allowed:
                    chain.move(node, strategy)
                    self.note()
            return
        cost, excess, before = chain.cost, chain.excess, dict[int, int]()
        while node not in before:
            before[node] = chain.choice[node]
            chain.move(node, strategy)
            if len(before) > 1 and self.random.random() >= CONTINUED:
                break
            node, strategy = chain.following(node, self._below(len(chain.edges[node])))
        if chain.cost - cost + self.price * (chain.excess - excess) <= allowed:
            self.note()
            return
        for changed, old in before.items():
            chain.move(changed, old)
        chain.cost = cost

    def increase(self, node: int, strategy: int) -> float:
        """By how much the cost rises with the price of memory."""
        chain = self.chain
        return chain.delta(node, strategy) + self.price * (chain.excess_after(node, strategy) - chain.excess)

    def descend(self) -> None:
        """Changes one node after the other as long as that saves, and keeps what is left if it is the best."""
        left = dict.fromkeys(self.free)
        while left and time.monotonic() < self.until:
            node = next(iter(left))
            del left[node]
            rises = [self.increase(node, strategy) for strategy in range(self.counts[node])]
            if (least := min(rises)) < -1e-12 * abs(self.chain.cost):
                self.chain.move(node, rises.index(least))
                left |= dict.fromkeys(j for j, _ in self.chain.edges[node] if self.counts[j] > 1)
        self.note()

    def note(self) -> None:
        """Remembers the choice if it is the best."""
        chain = self.chain
        if chain.excess or chain.cost >= min(self.best_cost, FORBIDDEN):
            return
        # Sums of many changes lose digits.
        chain.cost = self.problem.cost(chain.choice)
        if chain.cost < self.best_cost and self.problem.is_feasible(chain.choice):
            self.best, self.best_cost = chain.choice.copy(), chain.cost

    def _measure(self) -> None:
        """Sets the first temperature and the price of memory."""
        every = [(node, strategy) for node in self.free for strategy in range(self.counts[node])]
        some = every if len(every) <= MEASURED else self.random.sample(every, MEASURED)
        rises = [rise for change in some if 0 < (rise := self.chain.delta(*change)) < FORBIDDEN / 2]
        self.heat = sum(rises) / len(rises) if rises else self.heat
        self.price = PENALTY * self.heat * self.problem.num_nodes / self.problem.memory_bytes

    def _below(self, count: int) -> int:
        """A random number below that one."""
        return int(self.random.random() * count)
