"""`Problem`: one strategy per node, at least cost, within a memory limit at every time.

Variables `x[i]`, the strategy of node i; objective `sum_i costs[i][x[i]] + sum_(i,j) edge_costs[i,j][x[i], x[j]]`;
constraint, at every time t, `sum of usages[i][x[i]] over the nodes alive at t <= memory_bytes`. Node i is alive during
`intervals[i]`, without its end. This is Alpa's intra-operator problem (OSDI 2022, section 4.2) with memory by liveness,
as XLA's auto-sharding and the ASPLOS 2025 contest on intra-operator parallelism state it.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import ShardingError, raise_together

FORBIDDEN = 1e18
"""A cost from which on a strategy, or a pair of strategies, may not be chosen."""


class Flat(NamedTuple):
    """A problem's numbers end to end, for evaluation of all nodes and edges at once."""

    costs: np.ndarray
    usages: np.ndarray
    offsets: np.ndarray
    """First strategy of each node, and the number of all strategies."""
    edge_costs: np.ndarray
    """Each distinct matrix once, row by row."""
    edge_offsets: np.ndarray
    """First entry of each edge's matrix."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Problem:
    """Nodes with strategies, edges with cost matrices, and memory over time. Build it with `Problem.of`."""

    name: str
    costs: tuple[np.ndarray, ...]
    """Per node, the cost of each strategy, float64 [strategies]."""
    usages: tuple[np.ndarray, ...]
    """Per node, the memory of each strategy in bytes, float64 [strategies]."""
    intervals: np.ndarray
    """Per node, the first time when it is alive and the first when it no longer is, int64 [nodes, 2]."""
    edges: np.ndarray
    """Pairs of different nodes, int64 [edges, 2]; a pair may occur several times."""
    edge_costs: tuple[np.ndarray, ...]
    """Per edge, the cost of each pair of strategies, float64 [strategies of the first, of the second]."""
    memory_bytes: float = math.inf
    """The limit at every time."""
    splits: tuple[np.ndarray, ...] = ()
    """Per node, the factor that each mesh axis shards in each strategy, or -1 for none, int64 [strategies, axes]; empty
    if the problem doesn't say, as those of files."""

    @classmethod
    def of(
        cls,
        costs: Sequence[Sequence[float] | np.ndarray],
        edges: Iterable[tuple[int, int, Any]] = (),
        *,
        usages: Sequence[Sequence[float] | np.ndarray] | None = None,
        intervals: Sequence[tuple[int, int]] | np.ndarray | None = None,
        memory_bytes: float = math.inf,
        name: str = "",
        splits: Sequence[Any] | None = None,
    ) -> Problem:
        """A problem of plain lists or arrays.

        Args:
            costs: per node, the cost of each strategy.
            edges: (node, node, matrix of costs); inf or 1e18 forbids a pair.
            usages: per node, the bytes of each strategy; by default none.
            intervals: per node, [first time, end); by default all nodes are alive together.
            memory_bytes: the limit at every time.
            name: for tables and files.
            splits: per node, [strategies, mesh axes], the factor of the node that an axis shards, -1 for none; searches
                that decide one mesh axis after the other go by it.

        Raises:
            ShardingError: shapes don't fit, numbers are negative or not a number; all failures together.

        Example:
            >>> problem = Problem.of([[0, 3], [2, 0]], [(0, 1, [[0, 5], [5, 0]])], usages=[[8, 4], [8, 4]])
            >>> problem.cost([1, 1]), problem.peak_bytes([1, 1])
            (3.0, 8.0)
        """
        triples = list(edges)
        pairs = [(i, j) for i, j, _ in triples]
        matrices = {id(matrix): np.minimum(np.asarray(matrix, np.float64), FORBIDDEN) for _, _, matrix in triples}
        problem = cls(
            name=name,
            costs=tuple(_vector(cost) for cost in costs),
            usages=tuple(_vector(u) for u in ([[0.0] * len(c) for c in costs] if usages is None else usages)),
            intervals=np.asarray([(0, 1)] * len(costs) if intervals is None else intervals, np.int64).reshape(-1, 2),
            edges=np.asarray(pairs, np.int64).reshape(-1, 2),
            edge_costs=tuple(matrices[id(matrix)] for _, _, matrix in triples),
            memory_bytes=float(memory_bytes),
            splits=tuple(np.asarray(split, np.int64) for split in splits or ()),
        )
        raise_together(f"planner.Problem {name!r}", list(_failures(problem)))
        return problem

    def limited(self, memory_bytes: float | None) -> Problem:
        """This problem within another limit; None keeps its own, inf removes it.

        Raises:
            ShardingError: no choice fits, whatever it costs; the message has the smallest limit that one fits.
        """
        limit = self.memory_bytes if memory_bytes is None else float(memory_bytes)
        if not limit >= self.least_peak_bytes or limit <= 0:
            raise ShardingError(
                f"planner: {self!r} within memory_bytes={limit:,.0f}",
                found=f"a peak of {self.least_peak_bytes:,.0f} bytes if each node takes its smallest strategy",
                required="a limit that some choice fits",
                fix=f"memory_bytes={max(1.0, math.ceil(self.least_peak_bytes)):.0f} or more",
            )
        return self if limit == self.memory_bytes else dataclasses.replace(self, memory_bytes=limit)

    def is_feasible(self, choice: Sequence[int] | np.ndarray) -> bool:
        """Whether a choice stays within the limit and takes nothing forbidden."""
        return self.peak_bytes(choice) <= self.memory_bytes and self.cost(choice) < FORBIDDEN

    def write(self, path: str | Path) -> None:
        """Writes a JSON file that `planner.read` reads, compressed if the path ends with `.gz`.

        {"problem": {"name": ..., "nodes": {"intervals": [[first, end], ...], "costs": [...], "usages": [...]},
                     "edges": {"nodes": [[i, j], ...], "costs": [[row by row], ...]}, "usage_limit": bytes}}
        """
        content: dict[str, Any] = {
            "name": self.name,
            "nodes": {
                "intervals": self.intervals.tolist(),
                "costs": [_numbers(cost) for cost in self.costs],
                "usages": [_numbers(usage) for usage in self.usages],
            },
            "edges": {"nodes": self.edges.tolist(), "costs": [_numbers(m.ravel()) for m in self.edge_costs]},
        }
        if math.isfinite(self.memory_bytes):
            (content["usage_limit"],) = _numbers(np.array([self.memory_bytes]))
        data = json.dumps({"problem": content}).encode()
        # No time stamp: equal problems are equal files.
        Path(path).write_bytes(gzip.compress(data, mtime=0) if Path(path).suffix == ".gz" else data)

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.costs)

    @cached_property
    def num_strategies(self) -> np.ndarray:
        """Strategies of each node, int64 [nodes]."""
        return np.array([len(cost) for cost in self.costs], np.int64)

    def cost(self, choice: Sequence[int] | np.ndarray) -> float:
        """The cost of a strategy per node, int [nodes]."""
        flat, x = self.flat, self._checked(choice)
        i, j = self.edges.T
        at = flat.edge_offsets + x[i] * self.num_strategies[j] + x[j]
        return float(flat.costs[flat.offsets[:-1] + x].sum() + flat.edge_costs[at].sum())

    def memory_over_time(self, choice: Sequence[int] | np.ndarray) -> np.ndarray:
        """The bytes at each of `times`."""
        used = self.flat.usages[self.flat.offsets[:-1] + self._checked(choice)]
        first, end = self.spans.T
        steps = np.bincount(first, used, len(self.times) + 1) - np.bincount(end, used, len(self.times) + 1)
        return np.cumsum(steps)[:-1]

    def peak_bytes(self, choice: Sequence[int] | np.ndarray) -> float:
        """The most bytes at one time."""
        return float(self.memory_over_time(choice).max(initial=0.0))

    @cached_property
    def least_peak_bytes(self) -> float:
        """The smallest peak of any choice: each node's smallest usage."""
        return self.peak_bytes([int(np.argmin(usage)) for usage in self.usages])

    @cached_property
    def is_tight(self) -> np.ndarray:
        """Whether some choice exceeds the limit at each of `times`, bool."""
        return self.memory_over_time([int(np.argmax(usage)) for usage in self.usages]) > self.memory_bytes

    @cached_property
    def times(self) -> np.ndarray:
        """The times at which the set of nodes alive is not part of another time's, int64, ascending."""
        alive = self.intervals[self.intervals[:, 0] < self.intervals[:, 1]]
        starts, ends = np.unique(alive[:, 0]), np.unique(alive[:, 1])
        following = np.append(starts[1:], np.iinfo(np.int64).max)
        next_end = ends[np.searchsorted(ends, starts, side="right")] if len(starts) else ends
        return starts[next_end <= following]

    @cached_property
    def spans(self) -> np.ndarray:
        """Each node's interval as a range of indices into `times`, int64 [nodes, 2]."""
        spans = np.searchsorted(self.times, self.intervals)
        spans[:, 1] = np.maximum(spans[:, 0], spans[:, 1])
        return spans

    @cached_property
    def flat(self) -> Flat:
        """All numbers end to end."""
        distinct = {id(matrix): matrix for matrix in self.edge_costs}
        starts = np.cumsum([0, *(matrix.size for matrix in distinct.values())])
        at = dict(zip(distinct, starts[:-1], strict=True))
        return Flat(
            np.concatenate([*self.costs, np.zeros(0)]),
            np.concatenate([*self.usages, np.zeros(0)]),
            np.concatenate([[0], np.cumsum(self.num_strategies)]),
            np.concatenate([*(matrix.ravel() for matrix in distinct.values()), np.zeros(0)]),
            np.array([at[id(matrix)] for matrix in self.edge_costs], np.int64),
        )

    def _checked(self, choice: Sequence[int] | np.ndarray) -> np.ndarray:
        x = np.asarray(choice, np.int64)
        if x.shape != (self.num_nodes,) or (x < 0).any() or (x >= self.num_strategies).any():
            raise ShardingError(
                f"planner.Problem {self.name!r}: choice of shape {x.shape}",
                found=f"{self.num_nodes} nodes",
                required="one index of a strategy per node",
            )
        return x

    def __repr__(self) -> str:
        limit = "no memory limit" if math.isinf(self.memory_bytes) else f"{self.memory_bytes:,.0f} bytes"
        sizes = f"{self.num_nodes:,} nodes, {int(self.num_strategies.sum()):,} strategies, {len(self.edges):,} edges"
        return f"Problem({self.name!r}: {sizes}, {limit})"


def _numbers(values: np.ndarray) -> list[float]:
    """Plain numbers, whole ones as integers."""
    return [int(value) if value == int(value) else value for value in values.tolist()]


def _vector(values: Sequence[float] | np.ndarray) -> np.ndarray:
    return np.minimum(np.asarray(values, np.float64), FORBIDDEN)


def _failures(problem: Problem) -> Iterable[ShardingError]:
    """What is wrong with a problem's shapes and numbers."""
    n = problem.num_nodes
    for what, count in (("usages", len(problem.usages)), ("intervals", len(problem.intervals))):
        if count != n:
            yield ShardingError(what, found=f"{count} for {n} nodes", required="one per node")
    for i, (cost, usage) in enumerate(zip(problem.costs, problem.usages, strict=False)):
        if cost.ndim != 1 or not len(cost):
            yield ShardingError(f"costs[{i}]", found=f"shape {cost.shape}", required="a cost for each strategy")
        elif usage.shape != cost.shape:
            found = f"{usage.size} usages, {cost.size} costs"
            yield ShardingError(f"usages[{i}]", found=found, required="one usage per strategy")
        if not (usage >= 0).all():
            yield ShardingError(f"usages[{i}]", found=f"{usage.min():g}", required="no negative bytes")
        if not (np.abs(cost) <= FORBIDDEN).all():
            yield ShardingError(f"costs[{i}]", found=str(cost.tolist()), required="numbers above -1e18")
    for e, ((i, j), matrix) in enumerate(zip(problem.edges, problem.edge_costs, strict=True)):
        if not (0 <= i < n and 0 <= j < n) or i == j:
            yield ShardingError(f"edges[{e}]", found=f"nodes {i}, {j}", required=f"two different nodes below {n}")
        elif matrix.shape != (len(problem.costs[i]), len(problem.costs[j])):
            required = f"{len(problem.costs[i])} x {len(problem.costs[j])}, the strategies of nodes {i} and {j}"
            yield ShardingError(f"edges[{e}]", found=f"costs of shape {matrix.shape}", required=required)
        elif not (np.abs(matrix) <= FORBIDDEN).all():
            yield ShardingError(f"edges[{e}]", found="a cost that is not a number", required="numbers above -1e18")
    yield from _split_failures(problem)
    if not problem.memory_bytes > 0:
        found = f"{problem.memory_bytes:g}"
        yield ShardingError("memory_bytes", found=found, required="a positive number of bytes")


def _split_failures(problem: Problem) -> Iterable[ShardingError]:
    """What is wrong with the factors that mesh axes shard."""
    if not problem.splits:
        return
    if len(problem.splits) != problem.num_nodes:
        found = f"{len(problem.splits)} for {problem.num_nodes} nodes"
        yield ShardingError("splits", found=found, required="one per node, or none at all")
    num_axes = problem.splits[0].shape[-1] if problem.splits[0].ndim == 2 else 0
    for i, (cost, split) in enumerate(zip(problem.costs, problem.splits, strict=False)):
        if split.shape != (len(cost), num_axes):
            required = f"{len(cost)} strategies x mesh axes, as many axes for every node"
            yield ShardingError(f"splits[{i}]", found=f"shape {split.shape}", required=required)
        elif (split < -1).any():
            yield ShardingError(f"splits[{i}]", found=f"{split.min()}", required="indices of factors, or -1 for none")
