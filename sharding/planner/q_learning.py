"""Auto-MAP's deep Q-learning: a network learns what a decision costs in the end, from choices it made before."""

from __future__ import annotations

import collections
import math
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .partial_choice import PartialChoice, decision_order
from .problem import Problem
from .solution import Solution, nothing_found
from .strategy_scores import NUM_FEATURES, Weights, cost_scale, features_of, initial_weights, optimizer, padded, scores

EPISODES = 400
"""Choices that are made, node by node."""
LEARNING_RATE = 0.02
BATCH = 64
DECISIONS_PER_UPDATE = 2
UPDATES_PER_TARGET = 50
"""Updates of the network after which it becomes the target network."""
MEMORY = 4096
"""Decisions that are remembered."""
MOST_RANDOM, LEAST_RANDOM = 0.5, 0.05
"""Part of the decisions that are random at first, and from the second half on."""
RANDOM_DECISIONS = 2.0
"""Most random ones of an episode, on average: with a fixed part of many decisions none would be good throughout."""
BACKUPS = 6
"""Targets that each rest on the next one from the first decision to the end, for the number of steps of a target."""
DEAD = 2.0
"""What a node costs in a dead end, in multiples of the scale of costs."""


def solve(problem: Problem, *, memory_bytes: float | None = None, seconds: float = 60, seed: int = 0) -> Solution:
    """The cheapest choice that was made while learning.

    Nodes are decided one by one. With Q the cost from here on if a strategy is taken now, c what it adds, and Q' a
    network that follows Q in steps, each update moves Q on remembered decisions towards

        Q(state, p) = c1 + ... + cn + min over options q of Q'(state after n decisions, q).

    n is one of problems with few decisions, and grows with their number: with n = 1 what the last of a hundred
    decisions costs would need as many updates of Q' to reach the first.

    Strategies that exceed the limit, or that go with no option of a neighbour, are never taken. Nodes whose strategy
    follows from another's by forbidden pairs (linkage groups) are no decisions.

    Raises:
        ShardingError: no choice that fits was met.

    References:
        Wang et al., "Auto-MAP: A DQN Framework for Exploring Distributed Execution Plans for DNN Workloads", 2020
        (2007.04069), sections 4 and 5.

        Mnih et al., "Asynchronous Methods for Deep Reinforcement Learning", ICML 2016 (1602.01783), section 4, of
        targets of n steps.
    """
    problem, start = problem.limited(memory_bytes), time.monotonic()
    learner = Learner(problem, seed)
    episodes = 0
    try:
        while episodes < EPISODES and not learner.is_decided:
            done = min(1.0, 2 * episodes / EPISODES)
            learner.episode(MOST_RANDOM + (LEAST_RANDOM - MOST_RANDOM) * done)
            episodes += 1
            if time.monotonic() - start > seconds:
                break
        learner.episode(0.0)
    except KeyboardInterrupt:
        if learner.best is None:
            raise
    if learner.best is None or not problem.is_feasible(learner.best):
        raise nothing_found(problem, "dqn", is_proven=False, fix='algorithm="auto"')
    return Solution(
        problem=problem,
        choice=learner.best,
        algorithm="dqn",
        bound=-math.inf,
        evaluations=episodes + 1,
        seconds=time.monotonic() - start,
    )


class Decision(NamedTuple):
    """A state: the node that is decided next and what is known of its strategies."""

    node: int
    options: np.ndarray
    """Whether a strategy may be taken, [strategies]."""
    features: np.ndarray
    """[strategies, features]"""
    added: np.ndarray
    """What each strategy adds, with the least of edges to undecided nodes, in multiples of the scale, [strategies]."""


class Remembered(NamedTuple):
    """Decisions, what was taken, and what came `num_steps` decisions later; costs in multiples of the scale."""

    node: Any
    features: Any
    added: Any
    taken: Any
    cost: Any
    next_node: Any
    next_features: Any
    next_added: Any
    next_options: Any
    """None of them at the end."""


class Learner:
    """The network, its memory, and the best choice so far."""

    def __init__(self, problem: Problem, seed: int):
        self.rng = np.random.default_rng(seed)
        self.order = decision_order(problem)
        self.start = PartialChoice(problem)
        self.start.force(self.order)
        self.scale = cost_scale(problem)
        self.width = padded(int(problem.num_strategies.max(initial=1)))
        self.weights = initial_weights(jax.random.key(seed), padded(problem.num_nodes), self.width)
        self.target, self.state = self.weights, optimizer(LEARNING_RATE).init(self.weights)
        shape = MEMORY, self.width
        self.memory = Remembered(
            node=np.zeros(MEMORY, np.int32),
            features=np.zeros((*shape, NUM_FEATURES), np.float32),
            added=np.zeros(shape, np.float32),
            taken=np.zeros(MEMORY, np.int32),
            cost=np.zeros(MEMORY, np.float32),
            next_node=np.zeros(MEMORY, np.int32),
            next_features=np.zeros((*shape, NUM_FEATURES), np.float32),
            next_added=np.zeros(shape, np.float32),
            next_options=np.zeros(shape, bool),
        )
        self.num_free = int((self.start.choice < 0).sum())
        self.num_steps = max(1, self.num_free // BACKUPS)
        """Decisions whose costs are part of a target."""
        self.num_decisions = self.num_updates = 0
        self.best: np.ndarray | None = None
        self.best_cost = math.inf

    @property
    def is_decided(self) -> bool:
        """Whether nothing is left to decide."""
        return self.start.is_dead or bool((self.start.choice >= 0).all())

    def decision(self, partial: PartialChoice) -> Decision | None:
        """The next one; None if all nodes are decided, or in a dead end."""
        node = next((i for i in self.order if partial.choice[i] < 0), None)
        if node is None or partial.is_dead:
            return None
        own = slice(partial.offsets[node], partial.offsets[node + 1])
        options = np.zeros(self.width, bool)
        options[partial.options(node)] = True
        is_option = options[: own.stop - own.start]
        features, added = np.zeros((self.width, NUM_FEATURES), np.float32), np.zeros(self.width, np.float32)
        if options.any():
            costs = partial.local[own], partial.added_costs(node), partial.problem.costs[node]
            known = features_of([cost / self.scale for cost in costs], partial.extra[own], is_option)
            features[: len(is_option)] = known
            added[: len(is_option)] = np.where(is_option, costs[1] / self.scale, 0.0)
        return Decision(node, options, features, added)

    def episode(self, random_share: float) -> None:
        """Makes a choice, some of it at random, and learns from it."""
        partial, random_share = self.start.copied(), min(random_share, RANDOM_DECISIONS / max(1, self.num_free))
        decision = self.decision(partial)
        # Decisions whose target is not complete yet, and the costs before them.
        waiting = collections.deque[tuple[Decision, int, float]]()
        while decision is not None and decision.options.any():
            taken = self._taken(decision, random_share)
            after = partial.forced(decision.node, taken)
            following = self.decision(after)
            if after.is_dead or following is not None and not following.options.any():
                # Remembered, and not taken again here.
                self._remember(decision, taken, DEAD * len(self.order), None)
                decision.options[taken] = False
                continue
            waiting.append((decision, taken, partial.cost))
            partial, decision = after, following
            while waiting and (len(waiting) == self.num_steps or following is None):
                first, taken, cost = waiting.popleft()
                self._remember(first, taken, (partial.cost - cost) / self.scale, following)
        if partial.cost < self.best_cost and (partial.choice >= 0).all():
            self.best, self.best_cost = partial.choice, partial.cost

    def _taken(self, decision: Decision, random_share: float) -> int:
        (options,) = decision.options.nonzero()
        if self.rng.random() < random_share:
            return int(self.rng.choice(options))
        values = np.asarray(_values(self.weights, decision.node, decision.features, decision.added))
        return int(options[values[options].argmin()])

    def _remember(self, decision: Decision, taken: int, cost: float, following: Decision | None) -> None:
        at = self.num_decisions % MEMORY
        memory = self.memory
        memory.node[at], memory.features[at] = decision.node, decision.features
        memory.added[at], memory.taken[at], memory.cost[at] = decision.added, taken, cost
        memory.next_options[at] = False
        if following is not None:
            memory.next_node[at], memory.next_features[at] = following.node, following.features
            memory.next_added[at], memory.next_options[at] = following.added, following.options
        self.num_decisions += 1
        if self.num_decisions >= BATCH and self.num_decisions % DECISIONS_PER_UPDATE == 0:
            self._update()

    def _update(self) -> None:
        places = self.rng.integers(min(self.num_decisions, MEMORY), size=BATCH)
        batch = Remembered(*(array[places] for array in self.memory))
        self.weights, self.state = _updated(self.weights, self.target, self.state, batch)
        self.num_updates += 1
        if self.num_updates % UPDATES_PER_TARGET == 0:
            self.target = self.weights


def values_of(weights: Weights, node: Any, features: Any, added: Any) -> jax.Array:
    """Q of a node's strategies, [strategies]: what they add is known, the network learns the rest."""
    return added + scores(weights, node, features)


def targets(target: Weights, batch: Remembered) -> jax.Array:
    """What Q of remembered decisions should be: the cost added, and the least Q' of what came next."""
    values = jnp.where(
        batch.next_options, values_of(target, batch.next_node, batch.next_features, batch.next_added), jnp.inf
    )
    return batch.cost + jnp.where(batch.next_options.any(axis=1), values.min(axis=1), 0.0)


_values = jax.jit(values_of)


@jax.jit
def _updated(weights: Weights, target: Weights, state: Any, batch: Remembered) -> tuple[Weights, Any]:
    """One step of Adam on the Huber loss of a batch."""

    def loss(weights: Weights) -> jax.Array:
        values = values_of(weights, batch.node, batch.features, batch.added)
        error = jnp.take_along_axis(values, batch.taken[:, None], axis=1)[:, 0] - targets(target, batch)
        size = jnp.abs(error)
        return jnp.mean(jnp.where(size < 1, 0.5 * error**2, size - 0.5))

    updates, state = optimizer(LEARNING_RATE).update(jax.grad(loss)(weights), state)
    return jax.tree.map(jnp.add, weights, updates), state
