"""Classes of dims: those that ops tie together, such as all dims of a program that hold features."""

from __future__ import annotations

from collections import defaultdict

from ..graph import Graph
from ..rules import Rule

ArrayDim = tuple[int, int]
"""A value and one of its dims."""


class DimClasses:
    """The classes of a graph's dims: dims that share the major factor of an op are in one class."""

    def __init__(self, graph: Graph):
        self._shapes, self._first = graph.shapes, [0]
        for shape in graph.shapes:
            self._first.append(self._first[-1] + len(shape))
        self._parents = list(range(self._first[-1]))
        ties: dict[int, tuple[tuple[ArrayDim, ...], ...]] = {}  # by identity: a graph shares equal rules
        for op in graph.ops:
            if op.rule is None or op.is_unknown:
                continue
            found = ties.get(id(op.rule))
            if found is None:
                found = ties[id(op.rule)] = _ties(op.rule)
            values = op.operands + op.results
            for (a, d), *others in found:
                for b, e in others:
                    self._join((values[a], d), (values[b], e))
        for v, home in enumerate(graph.representatives):
            for d in range(len(graph.shapes[v]) if v != home else 0):
                self._join((home, d), (v, d))

    def form(self, v: int) -> tuple[tuple[int, int], ...]:
        """Returns the size and class of each dim of a value."""
        return tuple((size, self.of((v, d))) for d, size in enumerate(self._shapes[v]))

    def of(self, at: ArrayDim) -> int:
        """Returns the class of a dim, as a number."""
        return self._root(self._first[at[0]] + at[1])

    def _join(self, a: ArrayDim, b: ArrayDim) -> None:
        self._parents[self.of(b)] = self.of(a)

    def _root(self, i: int) -> int:
        parents = self._parents
        while parents[i] != i:
            parents[i] = parents[parents[i]]
            i = parents[i]
        return i


def major_factor(factors: tuple[int, ...], rule: Rule) -> int:
    """Returns the first factor of a dim that is larger than 1, which the dim's first axis shards."""
    return next((f for f in factors if rule.sizes[f] > 1), factors[0])


def _ties(rule: Rule) -> tuple[tuple[ArrayDim, ...], ...]:
    """Returns, for each factor that is the major one of several dims, their (array, dim)s, operands first."""
    found: defaultdict[int, list[ArrayDim]] = defaultdict(list)
    for a, array in enumerate(rule.operands + rule.results):
        for d, factors in enumerate(array):
            found[major_factor(factors, rule)].append((a, d))
    return tuple(tuple(at) for at in found.values() if len(at) > 1)
