"""Ops of any graph on accelerators and hosts so that the busiest device has the least to do, by an integer program.

Variables: `x[v, i]`, whether op v is on device i; `z[v, i]`, whether v or what reads it later is; `received[u, i]` and
`sent[u, i]`, whether accelerator i gets u's result or sends it; and the bottleneck L.

    minimise    L
    subject to  sum_i x[v, i] = 1                               every op               (_one_device)
                sum_v num_bytes[v] x[v, i] <= memory_bytes      every accelerator      (_memory)
                received[u, i] >= x[v, i] - x[u, i]             every edge (u, v)      (_transfers)
                sent[u, i] >= x[u, i] - x[v, i]
                sum_v seconds x + sum_u transfer (received + sent) <= L                (_loads)
                z[v, i] >= x[v, i], z[v, i] <= z[u, i],         every edge (u, v)      (_contiguous)
                z[v, i] <= x[v, i] - x[u, i] + 1
"""

from __future__ import annotations

import math
import time
from typing import Any, Literal, get_args

import numpy as np

from ...errors import ShardingError
from .device_placement import Placement, check_devices, does_not_fit
from .op_graph import OpGraph

Sets = Literal["contiguous", "any"]
"""What a device may have: ops of which no path leaves and re-enters the device, or any ops."""

ASKED = "cutting.place_ops_by_program"


def place_ops_by_program(
    graph: OpGraph,
    *,
    accelerators: int,
    hosts: int = 0,
    memory_bytes: float = math.inf,
    sets: Sets = "contiguous",
    seconds: float = 60,
) -> Placement:
    """The placement of least bottleneck, by HiGHS; for graphs with too many downsets for `cutting.place_ops`.

    Contiguous devices need not form a pipeline: two may read from each other. So the bottleneck can be below that of
    `cutting.place_ops`, never above it.

    Args:
        graph: ops, edges and costs.
        accelerators: each with `memory_bytes`.
        hosts: CPUs, which run ops in `host_seconds`.
        memory_bytes: of an accelerator, for the sum of its ops' `num_bytes`.
        sets: what a device may have.
        seconds: after which it is an error that no optimal placement is known.

    Example:
        >>> graph = OpGraph(seconds=[2, 3, 3, 2], transfer=[1, 1, 1, 0], edges=[(0, 1), (0, 2), (1, 3), (2, 3)])
        >>> place_ops_by_program(graph, accelerators=2).bottleneck
        7.0

    Raises:
        ShardingError: no accelerators, unknown sets, the ops don't fit, or time ends.

    References:
        Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators", NeurIPS 2020 (2006.16423),
        sections 5.1.2 and 5.1.3.
    """
    check_devices(ASKED, accelerators, hosts)
    if sets not in get_args(Sets):
        raise ShardingError(f"{ASKED}(sets={sets!r})", found="no such kind", required=" or ".join(get_args(Sets)))
    if not seconds > 0:
        raise ShardingError(f"{ASKED}(seconds={seconds})", required="a positive number of seconds")
    rows = _Rows(graph, accelerators, hosts)
    rows.one_device()
    rows.memory(memory_bytes)
    rows.transfers()
    rows.loads()
    if sets == "contiguous":
        rows.contiguous()
    start = time.monotonic()
    result = rows.minimise(seconds)
    if result.status == 2:
        raise does_not_fit(ASKED, graph, accelerators, hosts, memory_bytes)
    if result.status != 0:
        raise ShardingError(
            f"{ASKED}: {graph.num_ops} ops on {accelerators + hosts} devices",
            found=f"no proven optimum after {time.monotonic() - start:.0f} s: {result.message}",
            required="an optimal placement",
            fix="more seconds, or cutting.place_ops",
        )
    chosen = result.x[: graph.num_ops * rows.devices].reshape(graph.num_ops, rows.devices)
    return Placement.of(graph, chosen.argmax(axis=1).tolist(), accelerators, hosts)


class _Rows:
    """The rows of the program, `low <= sum of coefficient * variable <= high`, and its variables by kind."""

    def __init__(self, graph: OpGraph, accelerators: int, hosts: int):
        self.graph, self.accelerators, self.devices = graph, accelerators, accelerators + hosts
        size = graph.num_ops * self.devices
        self.x, self.z, self.received, self.sent = (
            (start + np.arange(size)).reshape(graph.num_ops, self.devices) for start in range(0, 4 * size, size)
        )
        self.bottleneck = 4 * size
        self.upper = np.ones(4 * size + 1)
        self.upper[-1] = np.inf
        for v in range(graph.num_ops):
            for i in range(self.devices):
                self.upper[self.x[v, i]] = math.isfinite(self._seconds(v, i))
        self.rows: list[tuple[list[int], list[float], float, float]] = []

    def _seconds(self, op: int, device: int) -> float:
        return (self.graph.seconds if device < self.accelerators else self.graph.host_seconds)[op]

    def _row(self, terms: list[tuple[int, float]], low: float, high: float) -> None:
        self.rows.append(([int(at) for at, _ in terms], [value for _, value in terms], low, high))

    def one_device(self) -> None:
        """Every op has one device, and groups have the same."""
        for own in self.x:
            self._row([(at, 1.0) for at in own], 1.0, 1.0)
        for group in self.graph.together:
            for other in group[1:]:
                for a, b in zip(self.x[group[0]], self.x[other], strict=True):
                    self._row([(a, 1.0), (b, -1.0)], 0.0, 0.0)

    def memory(self, memory_bytes: float) -> None:
        """An accelerator's ops fit; in parts of the limit, since solvers' tolerances are absolute."""
        if math.isfinite(memory_bytes):
            scale = memory_bytes or 1.0
            for i in range(self.accelerators):
                terms = [(self.x[v, i], n / scale) for v, n in enumerate(self.graph.num_bytes)]
                self._row(terms, -np.inf, memory_bytes / scale)

    def transfers(self) -> None:
        """A result is received, or sent, where a reader's device differs."""
        for u, v in self.graph.edges:
            for i in range(self.accelerators):
                self._row([(self.received[u, i], 1.0), (self.x[v, i], -1.0), (self.x[u, i], 1.0)], 0.0, np.inf)
                self._row([(self.sent[u, i], 1.0), (self.x[u, i], -1.0), (self.x[v, i], 1.0)], 0.0, np.inf)

    def loads(self) -> None:
        """No device has more to do than the bottleneck."""
        for i in range(self.devices):
            own = [(v, self._seconds(v, i)) for v in range(self.graph.num_ops)]
            terms = [(self.x[v, i], s) for v, s in own if math.isfinite(s)]
            if i < self.accelerators:
                costs = enumerate(self.graph.transfer)
                terms += [(at, c) for u, c in costs for at in (self.received[u, i], self.sent[u, i])]
            self._row([*terms, (self.bottleneck, -1.0)], -np.inf, 0.0)

    def contiguous(self) -> None:
        """No path leaves a device and comes back."""
        for i in range(self.devices):
            for v in range(self.graph.num_ops):
                self._row([(self.z[v, i], 1.0), (self.x[v, i], -1.0)], 0.0, np.inf)
            for u, v in self.graph.edges:
                self._row([(self.z[u, i], 1.0), (self.z[v, i], -1.0)], 0.0, np.inf)
                self._row([(self.x[v, i], 1.0), (self.x[u, i], -1.0), (self.z[v, i], -1.0)], -1.0, np.inf)

    def minimise(self, seconds: float) -> Any:
        """HiGHS's result."""
        from scipy.optimize import milp
        from scipy.sparse import csr_array

        columns, values, lows, highs = zip(*self.rows, strict=True)
        counts = [len(own) for own in columns]
        where = np.repeat(np.arange(len(counts)), counts), np.concatenate(columns)
        matrix: Any = csr_array((np.concatenate(values), where), shape=(len(counts), len(self.upper)))
        objective = np.zeros(len(self.upper))
        objective[self.bottleneck] = 1.0
        return milp(
            objective,
            integrality=(np.arange(len(self.upper)) < self.x.size).astype(int),
            bounds=(0, self.upper),
            constraints=[(matrix, np.array(lows), np.array(highs))],
            options={"time_limit": seconds, "mip_rel_gap": 0.0},
        )
