"""Automap's Monte Carlo tree search: decisions one by one, each followed by what it forces."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .node_groups import equal_nodes
from .partial_choice import PartialChoice, decision_order
from .problem import Problem
from .solution import Solution, nothing_found
from .spreading_changes import SpreadingChanges

EPISODES = 2_000
"""After which the search ends, if not by time or because everything is explored."""
EXPLORATION = 0.1
"""UCT's constant, for costs between 0 and 1."""
ROLL_OUTS = 4
"""Changes of the best choice that are tried in a new state, and as many that keep none of its decisions."""
DECIDED = 0.1
"""Part of the new states from which all nodes are decided one by one instead."""
RANDOM_DECISIONS = 2
"""Then, on average; half of the times the others follow the best choice, half take what adds least."""
LEAST_INERTIA, MOST_INERTIA = 0.05, 0.95
"""Between which that of a change is random (`SpreadingChanges.spread`)."""


def solve(problem: Problem, *, memory_bytes: float | None = None, seconds: float = 60, seed: int = 0) -> Solution:
    """A cheap choice by Monte Carlo tree search with UCT.

    An episode goes down the tree of decisions, taking the strategy of least
    `mean cost - EXPLORATION range sqrt(log visits / visits of the strategy)`, until it meets a state that is new, and
    completes the choice. Of a state with n visits the 1 + sqrt(n) strategies that add least are looked at, of those
    that are left (progressive widening). After every decision `PartialChoice.propagate` drops what is needless now and
    decides what is forced. States whose undecided nodes face the same costs and limits are one, with the cost still to
    come. What is fully explored isn't visited again: if that is everything, the choice is proven.

    A roll-out takes the best choice so far where nothing is decided, changes one more node at random, and propagates
    that in both directions (`SpreadingChanges`), as Automap does with each decision. Where nodes are tied by costs and
    not by forbidden pairs, `PartialChoice.propagate` decides next to nothing, and only together do they change at a
    gain. A new state counts as the best of `ROLL_OUTS` such choices (leaf parallelisation). As many start from the
    first state, so that decisions in which the search is deep don't hide better ones; they only count if they are the
    best.

    If nodes are equal with their surroundings, as in repeated layers, the first half of the episodes decides all nodes
    of a group at once; the second half starts from the best choice of the first.

    Raises:
        ShardingError: nothing fits, or no choice was found.

    References:
        Schaarschmidt et al., "Automap: Towards Ergonomic Automated Parallelism for ML Models", 2021 (2112.02958),
        section 2. Deviation: the order of decisions is fixed, and there is no learned filter.

        Cazenave, Jouandeau, "On the Parallelization of UCT", 2007, section 2, of several roll-outs per leaf.
    """
    problem, start = problem.limited(memory_bytes), time.monotonic()
    groups = equal_nodes(problem)
    searches = [TreeSearch(problem, seed)]
    if any(len(group) > 1 for group in groups):
        searches.insert(0, TreeSearch(problem, seed, groups))
    for search in searches:
        search.best = min((other.best for other in searches), key=lambda one: one.cost)
        share = 0.5 if search is not searches[-1] else 1.0
        if not search.run(int(share * EPISODES), start + share * seconds):
            break
    best, is_proven = min((search.best for search in searches), key=lambda one: one.cost), searches[-1].is_done
    if math.isinf(best.cost) or not problem.is_feasible(best.choice):
        raise nothing_found(problem, "automap", is_proven=is_proven)
    return Solution(
        problem=problem,
        choice=best.choice,
        algorithm="automap",
        bound=problem.cost(best.choice) if is_proven else -math.inf,
        evaluations=sum(search.episodes for search in searches),
        seconds=time.monotonic() - start,
    )


class Completion(NamedTuple):
    """A choice of all nodes, and its cost; inf if the decisions so far allow none."""

    cost: float
    choice: np.ndarray


class Visit(NamedTuple):
    """A state on the way down an episode."""

    state: State
    place: int
    """The strategy taken, among the state's options."""
    cost: float
    """Before it."""
    choice: np.ndarray
    """Before it, -1 where undecided."""


class State:
    """A state of the tree: the node that is decided next, and what is known of each of its strategies."""

    def __init__(self, partial: PartialChoice, node: int):
        options = partial.options(node)
        self.node = node
        self.options = options[np.argsort(partial.added_costs(node)[options], kind="stable")]
        """What adds least first."""
        self.visits = np.zeros(len(options), np.int64)
        self.total = np.zeros(len(options))
        """Costs from here on, over all visits."""
        self.is_explored = np.zeros(len(options), bool)
        self.best_cost = math.inf
        """The least cost from here on."""
        self.best = partial.choice
        """The choice that has it; earlier nodes may have other strategies now."""

    @property
    def is_done(self) -> bool:
        """Whether everything below is explored."""
        return bool(self.is_explored.all())

    def completed(self, cost: float, choice: np.ndarray) -> Completion:
        """The best known way on from decisions that led here, with their cost."""
        return Completion(cost + self.best_cost, np.where(choice >= 0, choice, self.best))

    def selected(self, scale: float) -> int:
        """The place of the next strategy by UCT, of those that add least and are not explored: more with each visit."""
        total = int(self.visits.sum())
        places = np.flatnonzero(~self.is_explored)[: 1 + math.isqrt(total)]
        visits = self.visits[places]
        if not visits.all():
            return int(places[visits.argmin()])
        bonus = EXPLORATION * scale * np.sqrt(math.log(total) / visits)
        return int(places[np.argmin(self.total[places] / visits - bonus)])


class TreeSearch:
    """The states met so far, by signature, and the best choice.

    Args:
        problem: what to solve.
        seed: of roll-outs.
        groups: of nodes that take the same strategy if they can.
    """

    def __init__(self, problem: Problem, seed: int, groups: Sequence[Sequence[int]] = ()):
        self.rng = np.random.default_rng(seed)
        self.problem, self.changes = problem, SpreadingChanges(problem)
        self.order = decision_order(problem)
        self.peers = {i: group for group in groups for i in group}
        self.start = PartialChoice(problem)
        self.start.propagate(self.order)
        self.states: dict[bytes, State] = {}
        self.best = Completion(math.inf, self.start.choice)
        self.highest = -math.inf
        """The largest cost of a choice that was met."""
        self.episodes = 0
        first = self._next(self.start, 0)
        self.is_done = self.start.is_dead or first == len(self.order)
        """Whether no choice is better than the best."""
        if not self.is_done:
            self.states[self.start.signature()] = State(self.start, self.order[first])
        elif not self.start.is_dead:
            self.best = Completion(self.start.cost, self.start.choice)

    def run(self, episodes: int, until: float) -> bool:
        """Searches until all is explored, or episodes or time end, but for one episode; False if the user ends it."""
        try:
            while not self.is_done:
                self.episode()
                if self.episodes >= episodes or time.monotonic() > until:
                    break
        except KeyboardInterrupt:
            if self.best.cost == math.inf:
                raise
            return False
        return True

    def episode(self) -> None:
        """Goes down to a new state, completes its choice, and tells all states above."""
        partial, at, path = self.start.copied(), 0, list[Visit]()
        found, is_explored = None, True
        while not partial.is_dead and (at := self._next(partial, at)) < len(self.order):
            key = partial.signature()
            if key not in self.states:
                self.states[key] = State(partial, self.order[at])
                found, is_explored = self._completed(partial, at), False
                break
            state = self.states[key]
            if state.is_done:
                found = state.completed(partial.cost, partial.choice)
                break
            place = state.selected(max(0.0, self.highest - self.best.cost))
            path.append(Visit(state, place, partial.cost, partial.choice.copy()))
            self._decide(partial, state.node, int(state.options[place]))
        found = found or Completion(partial.cost, partial.choice)
        self.episodes += 1
        if math.isfinite(found.cost):
            self.highest = max(self.highest, found.cost)
        self._tell(path, found, is_explored, partial.choice)

    def _tell(self, path: list[Visit], found: Completion, is_explored: bool, choice: np.ndarray) -> None:
        """Counts an episode in all its states; `choice` is what was decided before it was completed."""
        worst = 2 * self.highest - self.best.cost if math.isfinite(self.highest) else 0.0
        mean_cost = found.cost if math.isfinite(found.cost) else worst
        best = found
        for visit in reversed(path):
            state, place = visit.state, visit.place
            state.visits[place] += 1
            state.total[place] += mean_cost - visit.cost
            if best.cost - visit.cost < state.best_cost:
                state.best_cost, state.best = best.cost - visit.cost, best.choice
            state.is_explored[place] |= is_explored
            is_explored = state.is_done
            # Others that lead to this state may have met a better way on.
            best = state.completed(visit.cost, visit.choice)
        if best.cost < self.best.cost:
            self.best = best
        self.is_done = is_explored

    def _next(self, partial: PartialChoice, at: int) -> int:
        """The place of the next undecided node in the order."""
        while at < len(self.order) and partial.choice[self.order[at]] >= 0:
            at += 1
        return at

    def _decide(self, partial: PartialChoice, node: int, strategy: int) -> None:
        """Decides a node, and its group where possible, and what follows from that."""
        for peer in (node, *self.peers.get(node, ())):
            if partial.choice[peer] < 0 and strategy in partial.options(peer):
                partial.decide(peer, strategy)
                partial.propagate([j for j, _, _ in partial.edges[peer]])

    def _completed(self, partial: PartialChoice, at: int) -> Completion:
        """The best of several roll-outs from a new state; roll-outs from the first one may become the best choice."""
        found = Completion(math.inf, partial.choice)
        if math.isfinite(self.best.cost) and self.rng.random() >= DECIDED:
            anywhere = (self._changed_best(self.start) for _ in range(ROLL_OUTS))
            self.best = min(self.best, *anywhere, key=lambda one: one.cost)
            found = min((self._changed_best(partial) for _ in range(ROLL_OUTS)), key=lambda one: one.cost)
        return found if math.isfinite(found.cost) else self._rolled_out(partial, at)

    def _changed_best(self, partial: PartialChoice) -> Completion:
        """The best choice with what is decided here, one more decision at random, and what follows from both."""
        fixed, best = partial.choice >= 0, self.best.choice
        changes = {int(i): int(partial.choice[i]) for i in np.flatnonzero(fixed & (partial.choice != best))}
        node = int(self.rng.choice(np.flatnonzero(~fixed)))
        if not len(options := partial.options(node)):
            return Completion(math.inf, partial.choice)
        strategy = int(self.rng.choice(options))
        changes |= {i: strategy for i in (node, *self.peers.get(node, ())) if not fixed[i]}
        choice = self.changes.spread(best, changes, fixed=fixed, inertia=self.rng.uniform(LEAST_INERTIA, MOST_INERTIA))
        return Completion(self.problem.cost(choice) if self.problem.is_feasible(choice) else math.inf, choice)

    def _rolled_out(self, partial: PartialChoice, at: int) -> Completion:
        """Decides all other nodes, some at random, the others by what adds least; all of them the first time.

        What leaves another node without options is undone.
        """
        follows_best = self.rng.random() < 0.5
        random_share = min(0.5, RANDOM_DECISIONS / (partial.choice < 0).sum())
        while not partial.is_dead and (at := self._next(partial, at)) < len(self.order):
            node = self.order[at]
            options = partial.options(node)
            if not len(options):
                return Completion(math.inf, partial.choice)
            ranks = partial.added_costs(node)[options]
            if self.episodes and self.rng.random() < random_share:
                # The second best half as often as the best, and so on.
                ranks = np.argsort(np.argsort(ranks)) - self.rng.geometric(0.5)
                ranks = np.where(ranks < 0, len(options) + ranks, ranks)
            elif follows_best:
                ranks = np.where(options == self.best.choice[node], -np.inf, ranks)
            for place in np.argsort(ranks, kind="stable").tolist():
                trial = partial.copied()
                self._decide(trial, node, int(options[place]))
                if not trial.is_dead:
                    partial = trial
                    break
            else:
                return Completion(math.inf, partial.choice)
        return Completion(partial.cost, partial.choice)
