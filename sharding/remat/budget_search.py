"""The search for what to keep: trade-offs between peak memory and time, the same ones for every budget.

A program has decisions, such as a named value, each with options from the one that takes most memory to the one that
takes least. The search starts at the most memory and goes down, each time by the move that costs least time per byte of
the peak. Then it changes one decision of each of the best programs, as long as that finds better ones (Pareto local
search: Paquete, Chiarandini and Stuetzle, 2004). All programs that were priced on the way are trade-offs. As none of
this depends on a budget, the fastest one within a budget gets no slower when the budget grows.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

Options = tuple[Hashable, ...]
"""One option per decision."""
EXHAUSTIVE = 32
"""Combinations that are all priced."""
MOST_PRICED = 64
"""Programs after which the best ones are no longer improved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a program takes of each device, as predicted."""

    peak_bytes: int
    seconds: float
    """Of one call."""
    flops: float
    """Of matrix products and convolutions."""
    host_bytes: int = 0
    """In the host's memory."""


@dataclass(slots=True, eq=False)
class Search:
    """Trade-offs of a program."""

    decisions: Sequence[Options]
    """The options of each decision, most memory first."""
    price: Callable[[Options], Cost]
    """Of the program with these options."""
    most_host_bytes: float = math.inf
    """Of the host's memory per device."""
    priced: dict[Options, Cost] = field(default_factory=dict)
    """All that were priced."""

    def run(self) -> list[tuple[Options, Cost]]:
        """The trade-offs that no other one beats in both peak and time, least memory first."""
        if math.prod(map(len, self.decisions)) <= EXHAUSTIVE:
            for options in itertools.product(*self.decisions):
                self.cost(options)
        else:
            self.cost(tuple(options[-1] for options in self.decisions))
            self._descend()
            self._improve()
        return self._best()

    def cost(self, options: Options) -> Cost:
        """The cost of options, priced once."""
        if options not in self.priced:
            self.priced[options] = self.price(options)
        return self.priced[options]

    def _descend(self) -> None:
        """From the most memory to the least. A move keeps its old score until it is the best: then it is priced again,
        and made if no other one has a better score."""
        now, order = tuple(options[0] for options in self.decisions), itertools.count()
        moves = [(*self._score(now, move), next(order), move, now) for move in self._moves(now)]
        heapq.heapify(moves)
        while moves:
            *_, move, scored_at = heapq.heappop(moves)
            if not self._is_down(now, move):
                continue
            if scored_at != now:
                score = self._score(now, move)
                if moves and score > moves[0][:2]:
                    heapq.heappush(moves, (*score, next(order), move, now))
                    continue
            now = self._moved(now, move)

    def _improve(self) -> None:
        """Changes one decision of each of the best programs, until there are no better ones."""
        explored: set[Options] = set()
        while left := [options for options, _ in self._best() if options not in explored]:
            explored.add(left[0])
            for place, choices in enumerate(self.decisions):
                if left[0][place] not in choices:
                    continue  # a program outside of the decisions
                for number in range(len(choices)):
                    if len(self.priced) >= MOST_PRICED:
                        return
                    self.cost(self._moved(left[0], (place, number)))

    def _moves(self, now: Options) -> list[tuple[int, int]]:
        """(decision, number of its option), for all options with less memory."""
        places = range(len(self.decisions))
        return [(k, n) for k in places for n in range(self.decisions[k].index(now[k]) + 1, len(self.decisions[k]))]

    def _is_down(self, now: Options, move: tuple[int, int]) -> bool:
        place, number = move
        return number > self.decisions[place].index(now[place])

    def _moved(self, now: Options, move: tuple[int, int]) -> Options:
        place, number = move
        return (*now[:place], self.decisions[place][number], *now[place + 1 :])

    def _score(self, now: Options, move: tuple[int, int]) -> tuple[float, float]:
        """Seconds per byte of the peak that a move frees, then its seconds; infinite if it frees none, or the
        host has no room."""
        before, after = self.cost(now), self.cost(self._moved(now, move))
        freed, seconds = before.peak_bytes - after.peak_bytes, after.seconds - before.seconds
        is_move = freed > 0 and after.host_bytes <= self.most_host_bytes
        return seconds / freed if is_move else math.inf, seconds

    def _best(self) -> list[tuple[Options, Cost]]:
        """The programs that no other one beats in both peak and time, least memory first."""
        fitting = [one for one in self.priced.items() if one[1].host_bytes <= self.most_host_bytes]
        found: list[tuple[Options, Cost]] = []
        for options, cost in sorted(fitting, key=self._order):
            if not found or cost.seconds < found[-1][1].seconds:
                found.append((options, cost))
        return found

    def _order(self, one: tuple[Options, Cost]) -> tuple[float, float, float, int]:
        """By peak, then time, the host's memory, and the number of values that are not computed again."""
        options, cost = one
        num_held = sum(choice != choices[-1] for choice, choices in zip(options, self.decisions, strict=False))
        return cost.peak_bytes, cost.seconds, cost.host_bytes, num_held
