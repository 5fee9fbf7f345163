"""The problem of a program on a mesh: which way to shard each array, and each op that multiplies arrays.

A node is a group of values that are sharded alike (`value_groups.py`), whose strategies are its shardings, or an op
that relates several groups, such as a matrix product, whose strategies are the ways to put mesh axes on its factors. A
node costs seconds of computation, an edge the seconds of collectives between the sharding of a group and what an op
takes or yields: a sum over a sharded factor is reduced to the sharding of the result's group. An op of one or two
groups, such as a reduction or a transpose, is no node: it runs as its larger array is sharded. Equal layers are one
node, with the sum of their costs; bodies of loops count as often as they run.

Memory of a group: the most bytes of its values that are alive at once, from its first op to its last.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np

from .. import cost
from ..cost import Topology
from ..explain.fused_ops import NO_WORK, never_stored
from ..explain.runs_moved import times_moved
from ..graph import Annotation, Graph, Op
from ..hardware import Chip
from ..propagation.dim_classes import major_factor
from ..rules import Kind
from .graph_problem import MICRO, GraphProblem
from .pinned_costs import pinned_costs
from .problem import Problem
from .reshard_times import PARTIAL, REPLICATED, ReshardTimes, shardings_of, translated
from .value_groups import OpArray, ValueGroups

MOST_SHARDINGS = 256
"""Strategies of a node, at most: of arrays with more, the shortest dims stay whole."""
TIE = 1e-3
"""Microseconds that a replicated array costs beyond a sharded one: of equal plans the one with less memory wins."""


def of_graph(
    graph: Graph,
    on: Topology,
    *,
    annotations: Mapping[int, Annotation] | None = None,
    name: str = "",
) -> GraphProblem:
    """The problem of a program.

    Args:
        graph: the program.
        on: the mesh with its devices and links.
        annotations: to keep: other shardings of these values are forbidden.
        name: for tables and files.

    Example:
        >>> import jax
        >>> import sharding
        >>> from sharding import planner
        >>> with sharding.mesh(x=8, devices="h100:1x8") as mesh:
        ...     completion = sharding.jit(lambda x: x @ x).complete(jax.ShapeDtypeStruct((8, 8), "float32"))
        ...     len(planner.of_graph(completion.assignment.graph, sharding.topology(mesh)).problem.edges)
        2

    References:
        Zheng et al., "Alpa", OSDI 2022, section 4; Alabed et al., "TOAST", arXiv 2508.15010.
    """
    return _Builder(graph, on, ValueGroups(graph), annotations or {}).problem(name)


@dataclass(slots=True)
class _Node:
    """A node while it is built."""

    shardings: np.ndarray
    costs: np.ndarray
    """float64 [3, strategies]: seconds, those of them that collectives of arguments take, bytes on the wire."""
    usages: np.ndarray
    interval: tuple[int, int]


@dataclass(slots=True)
class _Builder:
    graph: Graph
    on: Topology
    groups: ValueGroups
    annotations: Mapping[int, Annotation]
    nodes: list[_Node] = field(default_factory=list)
    node_of: dict[int, int] = field(default_factory=dict)
    edges: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    """As costs of nodes, float64 [3, strategies of the first, of the second]."""
    times: ReshardTimes = field(init=False)
    positions: dict[int, int] = field(init=False)
    """id of an op -> its place in the program."""
    readers: Counter = field(init=False)
    stored_nowhere: frozenset[int] = field(init=False)
    inputs: set[int] = field(init=False)
    chip: Chip = field(init=False)
    """At its rates alone."""

    def __post_init__(self) -> None:
        self.chip = self.on.chip.without_overheads()
        self.times = ReshardTimes(self.on)
        self.positions = {id(op): k for k, op in enumerate(self.graph.ops)}
        self.inputs = set(self.graph.inputs)
        self.stored_nowhere = never_stored(self.graph, self.chip.platform)
        self.readers = Counter(
            self.read(op, a.value) for op in self.groups.ops for a in self.joined(op) if not a.is_result
        )

    def problem(self, name: str) -> GraphProblem:
        for group, first in enumerate(self.groups.tied):
            if group == first:
                self.add_group(group)
        seen: Counter = Counter()
        samples: dict[tuple, Op] = {}
        for op in self.groups.ops:
            key = self.key(op)
            seen[key] += 1
            samples.setdefault(key, op)
        for key, op in samples.items():
            self.add_op(op, seen[key])
        for v, annotation in self.annotations.items():
            self.pin(v, annotation)
        made = Problem.of(
            [MICRO * node.costs[0] + TIE / self.times.num_parts(node.shardings) for node in self.nodes],
            [(i, j, MICRO * costs[0]) for (i, j), costs in self.edges.items()],
            usages=[node.usages for node in self.nodes],
            intervals=[node.interval for node in self.nodes],
            splits=[node.shardings for node in self.nodes],
            name=name,
        )
        return GraphProblem(
            graph=self.graph,
            problem=made,
            groups=self.groups,
            axes=self.times.axes,
            shardings=tuple(node.shardings for node in self.nodes),
            nodes=self.node_of,
            node_moves=tuple(node.costs[1:] for node in self.nodes),
            edge_moves=tuple(costs[1:] for costs in self.edges.values()),
        )

    def node(self, group: int) -> int:
        return self.node_of[self.groups.tied[group]]

    def add_group(self, group: int) -> None:
        """Adds the node of a group and its equal ones."""
        tied = [v for k, first in enumerate(self.groups.tied) if first == group for v in self.groups.members[k]]
        shardings = shardings_of(self.groups.shape(group), self.times.sizes, most=MOST_SHARDINGS)
        most, interval = self.memory(tied)
        self.node_of[group] = len(self.nodes)
        parts = self.times.num_parts(shardings)
        self.nodes.append(_Node(shardings, np.zeros((3, len(shardings))), most / parts, interval))

    def pin(self, v: int, annotation: Annotation) -> None:
        """Forbids the shardings that contradict an annotation."""
        group = self.groups.of(v)
        if group is not None:
            node = self.nodes[self.node(group)]
            node.costs[0] = pinned_costs(node.costs[0], node.shardings, self.times.axes, annotation)

    def memory(self, values: Sequence[int]) -> tuple[float, tuple[int, int]]:
        """The most bytes of some values that are alive at once, and from when to when some are."""
        end = len(self.graph.ops)
        outputs = set(self.graph.outputs)
        steps: defaultdict[int, float] = defaultdict(float)
        for v in values:
            if v in self.stored_nowhere:
                continue
            first = 0 if v in self.inputs else self.positions[id(self.graph.makers[v])]
            last = max((self.positions[id(op)] for op in self.graph.users.get(v, ())), default=first)
            last = end if v in outputs and self.graph.representatives[v] == v else last
            steps[first] += self.graph.num_bytes(v)
            steps[last + 1] -= self.graph.num_bytes(v)
        times = sorted(steps)
        alive = list(itertools.accumulate(steps[t] for t in times))
        return max(alive, default=0.0), (times[0], times[-1]) if times else (0, 0)

    def joined(self, op: Op) -> list[OpArray]:
        """The arrays of an op that is a node; none of another one."""
        assert op.rule is not None
        arrays = list(self.groups.arrays(op))
        multiplies = Kind.REDUCE in op.rule.kinds and sum(not a.is_result for a in arrays) > 1
        is_node = not op.is_unknown and (multiplies or len({self.groups.tied[a.group] for a in arrays}) > 2)
        return arrays if is_node else []

    def read(self, op: Op, v: int) -> tuple:
        """What ops have in common that read one array in one region, and can share its gather."""
        region = self.graph.regions.get(id(op.site[0])) if op.site else None
        return v, id(region)

    def key(self, op: Op) -> tuple:
        """Equal for ops of equal layers."""
        arrays = tuple(
            (self.node(a.group), a.is_result, self.graph.num_bytes(a.value), self.runs(op, a), self.share(op, a))
            for a in self.groups.arrays(op)
        )
        return op.name, id(op.rule), op.times, arrays, op.source

    def runs(self, op: Op, array: OpArray) -> int:
        return op.times if array.is_result else times_moved(self.graph, op, array.value)

    def share(self, op: Op, array: OpArray) -> float:
        """The part of an operand's reshard that an op causes, where others read it alike."""
        return 1.0 if array.is_result else 1.0 / max(1, self.readers[self.read(op, array.value)])

    def add_op(self, op: Op, count: int) -> None:
        """Adds an op, which occurs several times in equal layers, as a node or as costs of its groups."""
        arrays = list(self.groups.arrays(op))
        if not arrays:
            return
        if op.is_unknown:
            for a in arrays:
                node = self.nodes[self.node(a.group)]
                if not a.is_result:
                    whole = np.full(len(self.times.axes), REPLICATED, np.int8)
                    seconds, wire_bytes = self.times.moves(node.shardings, whole, self.graph.num_bytes(a.value))
                    node.costs[0] += count * self.runs(op, a) * seconds
                    node.costs[2] += count * self.runs(op, a) * wire_bytes
        elif self.joined(op):
            self.add_node(op, arrays, count)
        else:
            self.add_light(op, arrays, count)

    def shardable(self, op: Op) -> set[int]:
        """The factors along which an op can run sharded."""
        assert op.rule is not None
        kinds = enumerate(op.rule.kinds)
        return {f for f, kind in kinds if kind in (Kind.PASS, Kind.REDUCE) and f not in op.rule.blocked}

    def add_node(self, op: Op, arrays: Sequence[OpArray], count: int) -> None:
        assert op.rule is not None
        factors = shardings_of(op.rule.sizes, self.times.sizes, dims=self.shardable(op), most=MOST_SHARDINGS)
        own = len(self.nodes)
        at = self.positions[id(op)]
        costs = np.zeros((3, len(factors)))
        costs[0] = count * op.times * self.seconds(op, factors)
        self.nodes.append(_Node(factors, costs, np.zeros(len(factors)), (at, at + 1)))
        for a in arrays:
            group = self.node(a.group)
            self.add_edge(own, group, count * self.moved(op, a, factors[:, None], self.nodes[group].shardings[None]))

    def add_light(self, op: Op, arrays: Sequence[OpArray], count: int) -> None:
        """Adds an op that runs as its largest array is sharded."""
        main = max(arrays, key=lambda a: (math.prod(self.graph.shapes[a.value]), a.is_result))
        node = self.node(main.group)
        factors = self.as_factors(op, main, self.nodes[node].shardings)
        if op.name not in NO_WORK:
            self.nodes[node].costs[0] += count * op.times * self.seconds(op, factors)
        for a in arrays:
            other = self.node(a.group)
            if other == node:
                self.nodes[node].costs += count * self.moved(op, a, factors, self.nodes[node].shardings)
            else:
                self.add_edge(
                    node, other, count * self.moved(op, a, factors[:, None], self.nodes[other].shardings[None])
                )

    def add_edge(self, i: int, j: int, costs: np.ndarray) -> None:
        pair = (i, j) if i < j else (j, i)
        costs = costs if i < j else costs.swapaxes(1, 2)
        self.edges[pair] = self.edges[pair] + costs if pair in self.edges else costs

    def moved(self, op: Op, array: OpArray, factors: np.ndarray, shardings: np.ndarray) -> np.ndarray:
        """What the collectives between how an op runs and how a group is sharded add to costs."""
        assert op.rule is not None
        dims = {major_factor(own, op.rule): d for d, own in enumerate(array.dims)}
        num_bytes, runs = self.graph.num_bytes(array.value), self.runs(op, array) * self.share(op, array)
        if array.is_result:
            inside = {f for own in array.dims for f in own}
            sums = {f: PARTIAL for f, kind in enumerate(op.rule.kinds) if kind is Kind.REDUCE and f not in inside}
            moves = self.times.moves(translated(factors, {**dims, **sums}), shardings, num_bytes)
        else:
            moves = self.times.moves(shardings, translated(factors, dims), num_bytes)
        seconds, wire_bytes = runs * moves
        return np.stack([seconds, seconds * self.is_argument(array.group), wire_bytes])

    def is_argument(self, group: int) -> bool:
        """Whether arguments are among the values of a group."""
        return not self.inputs.isdisjoint(self.groups.members[group])

    def as_factors(self, op: Op, array: OpArray, shardings: np.ndarray) -> np.ndarray:
        """The factors that are sharded where an op runs as one of its arrays is."""
        assert op.rule is not None
        allowed = self.shardable(op)
        found = np.full_like(shardings, REPLICATED)
        for d, own in enumerate(array.dims):
            f = major_factor(own, op.rule)
            if f in allowed:
                divides = op.rule.sizes[f] % self.times.parts_of(shardings, d) == 0
                found[(shardings == d) & divides[..., None]] = f
        return found

    def seconds(self, op: Op, factors: np.ndarray) -> np.ndarray:
        """Seconds of one run of an op on one device, for each way to put axes on its factors."""
        assert op.rule is not None
        sizes = np.array(op.rule.sizes, np.int64)
        parts = np.stack([self.times.parts_of(factors, f) for f in range(len(sizes))], axis=-1)
        distinct, at = np.unique(parts, axis=0, return_inverse=True)
        lengths = (-(-sizes // distinct)).tolist()
        return np.array([self._seconds(op, row) for row in lengths])[at.reshape(-1)]

    def _seconds(self, op: Op, lengths: Sequence[int]) -> float:
        assert op.rule is not None
        values = (*op.operands, *op.results)
        shapes = [
            tuple(math.prod(lengths[f] for f in own) for own in dims) for dims in (*op.rule.operands, *op.rule.results)
        ]
        n = len(op.operands)
        arrays = [jax.ShapeDtypeStruct(s, self.graph.dtypes[v]) for v, s in zip(values, shapes, strict=True)]
        if not op.site:
            return 0.0
        done = cost.work(op.name, arrays[:n], arrays[n:], op.site[0].params)
        fused = sum(
            math.prod(s) * self.graph.itemsize(v)
            for v, s in zip(values, shapes, strict=True)
            if v in self.stored_nowhere
        )
        stored = dataclasses.replace(done, read_bytes=max(0.0, done.num_bytes - fused), written_bytes=0)
        return cost.op_seconds(stored, self.chip)
