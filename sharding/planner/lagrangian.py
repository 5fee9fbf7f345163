"""The solver for large problems: reductions, then messages, an integer program of what is left, or prices for memory.

Of most programs little is left, and message passing proves the best choice, or else an integer program. Otherwise
memory has a price per byte at each time (a Lagrange multiplier), which turns the limit into node costs. Prices rise at
times that exceed the limit and fall at others, while message passing gives bounds and choices under them, and random
forests of nodes improve those (`_price`). From the cheapest choice that fits, trees of further forests are changed if
that costs less and still fits (`_descend`), and integer programs decide parts of the problem: the neighbourhood of a
node, or the strategies that message passing deems nearly the best (`_merge`).
"""

from __future__ import annotations

import math
import time
from collections import deque

import numpy as np

from .core_problem import Core
from .cutting_planes import minimise_core
from .forests import Forest, random_forest
from .memory_repair import fit
from .message_passing import Messages
from .problem import FORBIDDEN, Problem
from .problem_reduction import Reduction
from .solution import Solution, is_proven, nothing_found

MOST_ENTRIES = 150_000
"""Entries of edges' matrices up to which the whole core is one integer program."""
MOST_PASSES = 50
"""Of messages before the integer program of the whole core."""
LEAST_RISE = 0.01
"""Of the bound by a pass, as part of what is missing for a proof, below which no more are made."""
PART_ENTRIES = 30_000
"""Entries of the integer program of a part, at first."""
LARGEST_TREE = 1000
"""Nodes of a tree; larger ones take more steps, one per level."""
NUM_FORESTS = 24
LAST_TRIES = 8
"""Choices that are tried once time has ended without any."""
MOST_FRUITLESS = 2000
"""Proposals without a better choice after which others are tried."""
STEP = 0.1
"""By which part prices change at first, at most."""
REDUCTION_SHARE = 0.3
"""Part of the time that reductions may take."""
RESERVE = 0.03
"""Part of the time that is left for the end, and for programs that stop a little late."""
MERGE_SHARE = 0.05
"""Part of the time that the integer program of a part may take."""


def solve(problem: Problem, *, memory_bytes: float | None = None, seconds: float = 60, seed: int = 0) -> Solution:
    """A cheap choice for problems of any size, and the cheapest one where that can be proven in time.

    Where integer programs don't end it, the schedule of the search follows the clock: then equal seeds may give
    different choices.

    Raises:
        ShardingError: nothing fits, or none was found in time.

    References:
        Lagrange multipliers for memory, as the winner of the ASPLOS 2025 contest ("Soft Constraints, Strong
        Solutions"); Kolmogorov, "Convergent Tree-Reweighted Message Passing for Energy Minimization", PAMI 28 (2006);
        Hamze and de Freitas, "From Fields to Trees", UAI 2004; Angelelli, Mansini, Speranza, "Kernel Search", Computers
        & Operations Research 37 (2010).
    """
    start = time.monotonic()
    problem = problem.limited(memory_bytes)
    core = Core.of(Reduction.of(problem), start + REDUCTION_SHARE * seconds)
    search = _Search(core, np.random.default_rng(seed), start + (1 - RESERVE) * seconds)
    try:
        search.run()
    except KeyboardInterrupt:
        if search.best is None:
            raise
    choice = None if search.best is None else core.restore(search.best)
    if choice is None or not problem.is_feasible(choice):
        raise nothing_found(problem, "lagrangian", is_proven=search.bound >= FORBIDDEN)
    return Solution(
        problem=problem,
        choice=choice,
        algorithm="lagrangian",
        bound=min(search.bound, problem.cost(choice)),
        evaluations=search.evaluations,
        seconds=time.monotonic() - start,
    )


class _Search:
    """The best choice so far and what the search learned."""

    def __init__(self, core: Core, rng: np.random.Generator, deadline: float):
        self.core, self.rng, self.deadline = core, rng, deadline
        self.best: np.ndarray | None = None
        """The cheapest choice of all rounds."""
        self.best_cost = math.inf
        self.current: np.ndarray | None = None
        """The choice that is improved, of this round until it is merged with the best."""
        self.current_cost = math.inf
        least = np.minimum.reduceat(core.problem.flat.costs, core.problem.flat.offsets[:-1]) if core.nodes else []
        self.bound = core.constant + float(np.sum(least) + sum(m.min() for m in core.problem.edge_costs))
        self.evaluations = 0
        self.forests: deque[Forest] = deque(maxlen=NUM_FORESTS)
        self.found: deque[np.ndarray] = deque(maxlen=12)
        """Recent choices of the last prices."""
        self.entries = PART_ENTRIES
        self.merge_seconds = max(5.0, MERGE_SHARE * (deadline - time.monotonic()))
        self.prices = np.zeros(len(core.memory.limit))
        self.cheap: np.ndarray | None = None
        """What message passing chooses without memory."""
        self.gaps = np.zeros(len(core.soft))
        """By how much a node's strategies are worse than its best one, by message passing."""

    @property
    def left(self) -> float:
        """Seconds."""
        return self.deadline - time.monotonic()

    def run(self) -> None:
        """Searches until the best choice is proven or time ends."""
        num_nodes = self.core.problem.num_nodes
        if not num_nodes:
            self._offer(np.zeros(0, np.int64))
            self.bound = self.best_cost
            return
        entries = sum(matrix.size for matrix in self.core.problem.edge_costs)
        if entries <= MOST_ENTRIES and (self._passed() or self._solved(0.6 * self.left)):
            return
        share = min(0.7, max(0.15, num_nodes / 6000))
        while self.left > 0 and not is_proven(self.best_cost, self.bound):
            self._round(share)
        if self.best is None and self.bound < FORBIDDEN:
            self._offer_any()

    def _round(self, share: float) -> None:
        """A new choice by prices, improved on its own, then merged with the best of earlier rounds.

        Args:
            share: part of the time left that prices take.
        """
        self.current, self.current_cost = None, math.inf
        self._price(time.monotonic() + share * self.left)
        if self.current is None:
            return
        self._descend(time.monotonic() + 0.4 * share * self.left)
        self._merge_until(time.monotonic() + 0.2 * share * self.left)
        self.found.append(self.current)
        self.current, self.current_cost = self.best, self.best_cost
        # Large problems have time for one round only.
        self._merge_until(time.monotonic() + (1.0 if share > 0.5 else 0.4 * share) * self.left)

    def _merge_until(self, until: float) -> None:
        while time.monotonic() < until and self.left > 0.1:
            self._merge()

    def _passed(self) -> bool:
        """Whether message passing alone proves a choice, as it often does where memory is not tight."""
        messages = Messages(self.core.arcs, np.random.default_rng(0))
        before = -math.inf
        for _ in range(MOST_PASSES):
            bound = messages.run(self.core.soft)
            self._bound(bound)
            self.cheap = messages.choice(self.core.soft)
            self._offer(self.cheap)
            if is_proven(self.best_cost, self.bound):
                self.bound = self.best_cost
                return True
            if bound - before < LEAST_RISE * (self.best_cost - self.bound):
                break
            before = bound
        return False

    def _solved(self, seconds: float) -> bool:
        """Whether the integer program of the whole core ended."""
        outcome = minimise_core(self.core, seconds=seconds, cheap=self.cheap)
        self.bound = max(self.bound, outcome.bound)
        if outcome.choice is not None:
            self._offer(outcome.choice)
        return is_proven(self.best_cost, self.bound) or outcome.bound >= FORBIDDEN

    def _offer(self, choice: np.ndarray) -> bool:
        """Keeps a choice that fits and is the cheapest so far."""
        self.evaluations += 1
        if self.core.excess(choice).max(initial=0.0) > 0:
            return False
        cost = self.core.cost(choice)
        if cost >= min(self.current_cost, FORBIDDEN):
            return False
        self.current, self.current_cost = choice.copy(), cost
        if cost < self.best_cost:
            self.best, self.best_cost = self.current, cost
        return True

    def _offer_any(self) -> None:
        """Some choice without forbidden pairs, however little time was left for a good one."""
        messages = Messages(self.core.arcs, self.rng)
        for _ in range(LAST_TRIES):
            messages.run(self.core.soft)
            choice = messages.choice(self.core.soft)
            self._forest().minimise(self.core.soft, choice)
            if self._offer(choice):
                return

    def _forest(self) -> Forest:
        """A random forest, new ones as long as few are known and sometimes later."""
        if len(self.forests) < NUM_FORESTS or self.rng.random() < 0.1:
            self.forests.append(random_forest(self.core.arcs, self.rng, largest=LARGEST_TREE))
            return self.forests[-1]
        return self.forests[int(self.rng.integers(NUM_FORESTS))]

    def _price(self, until: float) -> None:
        """Finds prices of memory, and choices by message passing and forests under them."""
        core, size = self.core, len(self.core.soft)
        limit = max(1.0, float(core.memory.limit.max(initial=1.0)))
        messages = Messages(core.arcs, self.rng)
        for _ in range(4):
            messages.run(core.soft)
        choice = messages.choice(core.soft)
        self._offer(choice)
        scale = max(1.0, abs(min(core.problem.cost(choice), core.barrier, self.best_cost - core.constant)))
        floor = 1e-6 * scale / limit / max(1, len(self.prices))
        # Every other round goes on from known prices.
        is_fresh = not self.prices.any() or self.rng.random() < 0.5
        prices = np.full_like(self.prices, 2e4 * floor) if is_fresh else np.maximum(self.prices, floor)
        steepness = STEP * (1.0 if self.best is None else 10 ** self.rng.uniform(-1, 0.3))
        begin = time.monotonic()
        while (now := time.monotonic()) < until and not is_proven(self.best_cost, self.bound):
            done = (now - begin) / (until - begin)
            costs = core.soft + core.memory.prices(prices, size)
            self._bound(messages.run(costs) - float(prices @ core.memory.limit))
            choice = messages.choice(costs)
            excess = core.excess(choice)
            self._offer(choice)
            for _ in range(2):
                self._forest().minimise(costs, choice)
            self._offer(choice)
            if not len(prices):
                continue
            change, step = np.clip(10 * excess / limit, -1, 1), steepness * (1 - done) + 0.005
            if done > 0.85:
                # The end only makes it fit.
                change = np.where(excess > 0, np.maximum(change, 0.1), 0.0)
                step = step if self.current is not None else 0.2
            prices = np.maximum(prices * np.exp(step * change), floor)
        if fit(core, core.soft + core.memory.prices(prices, size), choice):
            self._offer(choice)
        self.prices, self.found = prices, deque([*self.found, choice], maxlen=self.found.maxlen)
        totals, starts = messages.totals(core.soft + core.memory.prices(prices, size)), core.arcs.offsets[:-1]
        self.gaps = totals - np.repeat(np.minimum.reduceat(totals, starts), core.arcs.sizes)

    def _bound(self, bound: float) -> None:
        """Keeps a bound of the core, rounded against the error of its sum."""
        self.bound = max(self.bound, bound - 1e-9 * abs(bound) + self.core.constant)

    def _descend(self, until: float) -> None:
        """Changes trees of forests as long as that costs less and fits."""
        assert self.current is not None
        core, rng, size = self.core, self.rng, len(self.core.soft)
        noise = rng.gumbel(size=10 * size)
        factor = 1.0
        heat = 0.1 * abs(self.current_cost - core.constant) / core.problem.num_nodes
        fruitless = 0
        while time.monotonic() < until and fruitless < MOST_FRUITLESS:
            forest = self._forest()
            at = int(rng.integers(9 * size))
            paid = core.memory.prices(factor * self.prices, size)
            temperature = heat * 10 ** rng.uniform(-4, 0)
            proposed = self.current.copy()
            forest.minimise(core.soft + paid - temperature * noise[at : at + size], proposed)
            accepted = self._accepted(forest, proposed)
            fruitless = 0 if accepted else fruitless + 1
            factor = 10 ** rng.uniform(-1.5, 0.5) if not accepted else factor

    def _accepted(self, forest: Forest, proposed: np.ndarray) -> bool:
        """Takes those trees of a proposal that cost less and fit, the most saving ones first."""
        assert self.current is not None
        core, problem, now = self.core, self.core.problem, self.current.copy()
        changed = np.flatnonzero(proposed != now)
        flat, (i, j) = problem.flat, problem.edges.T
        saved = np.zeros(problem.num_nodes)
        first = flat.offsets[:-1]
        np.add.at(saved, forest.tree[changed], (flat.costs[first + now] - flat.costs[first + proposed])[changed])
        moved = proposed != now
        touched = np.flatnonzero(moved[i] | moved[j])
        i, j = i[touched], j[touched]
        rows, width = flat.edge_offsets[touched], problem.num_strategies[j]
        difference = flat.edge_costs[rows + now[i] * width + now[j]]
        difference = difference - flat.edge_costs[rows + proposed[i] * width + proposed[j]]
        np.add.at(saved, forest.tree[np.where(moved[i], i, j)], difference)
        trees = np.flatnonzero(saved > 0)
        by_tree = {tree: changed[forest.tree[changed] == tree] for tree in trees.tolist()}
        excess, memory = core.excess(now), core.memory
        for tree in trees[np.argsort(-saved[trees], kind="stable")].tolist():
            nodes = by_tree[tree]
            parts = np.concatenate([memory.by_node[node] for node in nodes])
            before = memory.usages[memory.offset[parts] + now[memory.node[parts]]]
            after = memory.usages[memory.offset[parts] + proposed[memory.node[parts]]]
            steps = np.bincount(memory.first[parts], after - before, len(excess) + 1)
            steps = steps - np.bincount(memory.end[parts], after - before, len(excess) + 1)
            trial = excess + np.cumsum(steps)[:-1]
            if trial.max(initial=0.0) <= 0:
                excess, now[nodes] = trial, proposed[nodes]
        return self._offer(now)

    def _merge(self) -> None:
        """An integer program over part of the strategies, those of the best choice among them."""
        assert self.current is not None
        kinds = [self._neighbourhood, self._kernel]
        allowed = kinds[int(self.rng.integers(len(kinds)))]()
        part = self.core.restricted(allowed)
        start, choice = time.monotonic(), np.zeros(0, np.int64)
        if part.nodes:
            choice = minimise_core(part, seconds=min(self.merge_seconds, 0.9 * self.left)).choice
        if choice is not None:
            self._offer(part.restore(choice))
        # Programs should take some seconds: neither many trivial ones nor one that never ends.
        took = time.monotonic() - start
        if took < 0.2 * self.merge_seconds:
            self.entries = int(1.3 * self.entries)
        elif took > 0.9 * self.merge_seconds:
            self.entries = max(1000, self.entries // 2)

    def _neighbourhood(self) -> list[np.ndarray]:
        """All strategies of the nodes around a random one, and the best choice's of the others."""
        assert self.current is not None
        arcs, entries = self.core.arcs, 0
        allowed = [np.array([strategy]) for strategy in self.current]
        for node in self._around(int(self.rng.integers(len(allowed)))):
            allowed[node] = np.arange(arcs.sizes[node])
            near = arcs.target[arcs.by_source[arcs.first[node] : arcs.first[node + 1]]]
            entries += sum(len(allowed[node]) * len(allowed[other]) for other in near if len(allowed[other]) > 1)
            if entries > self.entries:
                break
        return allowed

    def _kernel(self) -> list[np.ndarray]:
        """Strategies that message passing deems nearly as good as the best ones, and those of choices found."""
        assert self.current is not None
        arcs = self.core.arcs
        known = np.zeros(len(self.gaps), bool)
        for choice in (*self.found, self.current):
            known[arcs.offsets[:-1] + choice] = True
        # Blurred, so that no two kernels are equal.
        gaps = self.gaps * np.exp(self.rng.normal(0, 0.7, len(self.gaps)))
        pairs = self.core.problem.edges
        ascending, low, high = np.sort(gaps), 0, len(gaps) - 1
        while low < high:
            middle = (low + high + 1) // 2
            counts = np.add.reduceat((gaps <= ascending[middle]) | known, arcs.offsets[:-1], dtype=np.int64)
            free = (counts[pairs] > 1).all(axis=1)
            if (counts[pairs].prod(axis=1) * free).sum() <= self.entries:
                low = middle
            else:
                high = middle - 1
        inside = (gaps <= ascending[low]) | known
        return [np.flatnonzero(own) for own in np.split(inside, arcs.offsets[1:-1])]

    def _around(self, start: int) -> list[int]:
        """All nodes that a node is connected to, nearest first, in random order at equal distance."""
        arcs, rng = self.core.arcs, self.rng
        seen, found, queue = {start}, [start], [start]
        while queue:
            following: list[int] = []
            for node in queue:
                near = arcs.target[arcs.by_source[arcs.first[node] : arcs.first[node + 1]]]
                # A hub would make every neighbourhood that of the hubs.
                near = rng.permutation(near)[:12].tolist()
                following += [i for i in near if i not in seen]
                seen.update(near)
            found += following
            queue = following
            if len(found) > 5000:
                break
        return list(dict.fromkeys(found))
