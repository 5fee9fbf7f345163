"""Groups of values that a plan shards alike, and groups of equal layers that it decides together.

Arrays that an op relates dim by dim, such as the operands and the result of an addition, are one group: a parameter
with its gradient and optimizer state, the residual stream of all layers. These are TOAST's colours (arXiv 2508.15010),
of whole arrays. Groups of different layers with equal surroundings are decided together, so that planning takes no
longer for more layers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from ..graph import Graph, Op
from .node_groups import numbered

ROUNDS = 3
"""How many ops away the surroundings of two groups are compared."""


@dataclass(frozen=True, slots=True)
class OpArray:
    """One array of an op."""

    value: int
    dims: tuple[tuple[int, ...], ...]
    """For each dim, its factors in the op's rule."""
    is_result: bool
    group: int


class ValueGroups:
    """The groups of a program's live arrays.

    Attributes:
        graph: the program.
        ops: those with a rule that a result depends on.
        members: group -> its values, in program order.
        tied: group -> the first of the groups that are decided together with it.
    """

    def __init__(self, graph: Graph):
        self.graph = graph
        live = graph.live_values | set(graph.inputs)
        self.ops = [op for op in graph.ops if op.rule is not None and graph.is_live(op, live)]
        known = {*graph.inputs, *graph.makers}
        self._parents = {v: v for v in known if v in live and graph.shapes[v]}
        for op in self.ops:
            for first, *others in self._alike(op):
                for v in others:
                    self._join(first, v)
        for v, home in enumerate(graph.representatives):
            if v != home and v in self._parents and home in self._parents:
                self._join(home, v)
        roots = {v: self._root(v) for v in sorted(self._parents)}
        numbers = {root: k for k, root in enumerate(dict.fromkeys(roots.values()))}
        self._groups = {v: numbers[root] for v, root in roots.items()}
        self.members: list[list[int]] = [[] for _ in numbers]
        for v, k in self._groups.items():
            self.members[k].append(v)
        self.tied = self._tied()

    def of(self, v: int) -> int | None:
        """The group of a value; None for scalars, constants and what no result depends on."""
        return self._groups.get(v)

    def shape(self, group: int) -> tuple[int, ...]:
        """The shape of each of its values."""
        return self.graph.shapes[self.members[group][0]]

    def arrays(self, op: Op) -> Iterator[OpArray]:
        """Yields the arrays of an op that are in groups, operands first."""
        assert op.rule is not None
        n = len(op.operands)
        pairs = zip((*op.operands, *op.results), (*op.rule.operands, *op.rule.results), strict=True)
        for k, (v, dims) in enumerate(pairs):
            group = self.of(v)
            if group is not None:
                yield OpArray(v, dims, k >= n, group)

    def _alike(self, op: Op) -> Iterator[list[int]]:
        """Yields the arrays of an op whose dims have the same factors, together."""
        assert op.rule is not None
        if op.is_unknown:
            return
        found: defaultdict[tuple, list[int]] = defaultdict(list)
        pairs = zip((*op.operands, *op.results), (*op.rule.operands, *op.rule.results), strict=True)
        for v, dims in pairs:
            if v in self._parents:
                found[dims, self.graph.shapes[v]].append(v)
        yield from found.values()

    def _join(self, a: int, b: int) -> None:
        a, b = self._root(a), self._root(b)
        self._parents[max(a, b)] = min(a, b)

    def _root(self, v: int) -> int:
        parents = self._parents
        while parents[v] != v:
            parents[v] = parents[parents[v]]
            v = parents[v]
        return v

    def _tied(self) -> list[int]:
        """Compares groups by their names and ops, then by those of their neighbours (Weisfeiler and Leman 1968)."""
        names: defaultdict[int, set[str]] = defaultdict(set)
        for name, v in self.graph.names.items():
            if (k := self.of(v)) is not None:
                names[k].add(self.graph.layers.pattern(name))
        touching: list[list[tuple[Hashable, Sequence[OpArray], int]]] = [[] for _ in self.members]
        for op in self.ops:
            arrays = list(self.arrays(op))
            if len({a.group for a in arrays}) > 1:
                for at, a in enumerate(arrays):
                    touching[a.group].append(((op.name, op.source, str(op.rule), op.times), arrays, at))
        labels = numbered([(self.shape(k), frozenset(names[k])) for k in range(len(self.members))])
        for _ in range(ROUNDS):
            labels = numbered(
                [
                    (
                        labels[k],
                        frozenset((kind, at, tuple(labels[a.group] for a in arrays)) for kind, arrays, at in own),
                    )
                    for k, own in enumerate(touching)
                ]
            )
        firsts: dict[int, int] = {}
        return [firsts.setdefault(label, k) for k, label in enumerate(labels)]
