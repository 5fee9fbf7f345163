"""Ops of any graph on accelerators and hosts so that the busiest device has the least to do, by dynamic programming."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...errors import ShardingError
from ..task_table import check_positive, is_integer
from .downsets import downsets
from .op_graph import OpGraph


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A device for each op."""

    devices: tuple[int, ...]
    """Of each op: accelerators are numbered from 0, hosts after them."""
    loads: tuple[float, ...]
    """What each device does per minibatch."""

    @property
    def bottleneck(self) -> float:
        """Time per minibatch in the steady state of a pipeline: the largest load."""
        return max(self.loads)

    @classmethod
    def of(cls, graph: OpGraph, devices: Sequence[int], accelerators: int, hosts: int) -> Placement:
        """A placement with its loads."""
        chosen = np.arange(accelerators + hosts)[:, None] == np.asarray(devices)
        loads = [*graph.accelerator_loads(chosen[:accelerators]), *graph.host_loads(chosen[accelerators:])]
        return cls(devices=tuple(map(int, devices)), loads=tuple(map(float, loads)))


def place_ops(graph: OpGraph, *, accelerators: int, hosts: int = 0, memory_bytes: float = math.inf) -> Placement:
    """The placement of least bottleneck whose devices form a pipeline: each only reads from earlier ones.

    With I and J downsets of the graph, and acc and host the loads of a set of ops,

        best(I, k, l) = min over J in I of max(best(J, k - 1, l), acc(I - J)), max(best(J, k, l - 1), host(I - J))

    Exact. Takes downsets^2 (accelerators + 1) (hosts + 1) steps.

    Args:
        graph: ops, edges and costs.
        accelerators: each with `memory_bytes`.
        hosts: CPUs, which run ops in `host_seconds`.
        memory_bytes: of an accelerator, for the sum of its ops' `num_bytes`.

    Example:
        >>> graph = OpGraph(seconds=[2, 3, 3, 2], transfer=[1, 1, 1, 0], edges=[(0, 1), (0, 2), (1, 3), (2, 3)])
        >>> place_ops(graph, accelerators=2)
        Placement(devices=(0, 0, 1, 1), loads=(7.0, 7.0))

    Raises:
        ShardingError: no accelerators, too many downsets, or the ops don't fit.

    References:
        Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators", NeurIPS 2020 (2006.16423),
        section 5.1.1.
    """
    check_devices("cutting.place_ops", accelerators, hosts)
    classes = graph.classes()
    number = {op: k for k, own in enumerate(classes) for op in own}
    edges = [(number[u], number[v]) for u, v in graph.edges if number[u] != number[v]]
    found = downsets("cutting.place_ops", len(classes), edges)
    member = np.zeros((len(found), graph.num_ops), bool)
    for row, downset in zip(member, found, strict=True):
        for k, own in enumerate(classes):
            row[own] = downset >> k & 1
    best = np.full((len(found), accelerators + 1, hosts + 1), np.inf)
    best[0] = 0.0
    # The downset of earlier devices, and whether the last one is a host.
    back = np.zeros((*best.shape, 2), np.int64)
    for at in range(1, len(found)):
        (earlier,) = np.nonzero(~(member[: at + 1] & ~member[at]).any(axis=1))
        rest = member[at] & ~member[earlier]
        loads = graph.accelerator_loads(rest, memory_bytes), graph.host_loads(rest)
        for k in range(accelerators + 1):
            for h in range(hosts + 1):
                for is_host, (before_k, before_h) in enumerate([(k - 1, h), (k, h - 1)]):
                    if before_k >= 0 and before_h >= 0:
                        ways = np.maximum(best[earlier, before_k, before_h], loads[is_host])
                        if ways.min() < best[at, k, h]:
                            best[at, k, h] = ways.min()
                            back[at, k, h] = earlier[ways.argmin()], is_host
    if math.isinf(best[-1, accelerators, hosts]):
        raise does_not_fit("cutting.place_ops", graph, accelerators, hosts, memory_bytes)
    return Placement.of(graph, _devices(member, back, accelerators, hosts).tolist(), accelerators, hosts)


def check_devices(asked: str, accelerators: int, hosts: int) -> None:
    """Raises unless there are accelerators, and no negative number of hosts."""
    check_positive(asked, accelerators=accelerators)
    if not (is_integer(hosts) and hosts >= 0):
        raise ShardingError(f"{asked}(hosts={hosts!r})", required="0 or more")


def does_not_fit(asked: str, graph: OpGraph, accelerators: int, hosts: int, memory_bytes: float) -> ShardingError:
    """The error if no placement exists."""
    return ShardingError(
        f"{asked}(accelerators={accelerators}, hosts={hosts}, memory_bytes={memory_bytes:,.0f})",
        found=f"{sum(graph.num_bytes):,.0f} bytes of ops, the largest with {max(graph.num_bytes):,.0f}",
        required="a placement in which every op can run and every accelerator's ops fit its memory",
        fix="more accelerators, hosts, or memory_bytes",
    )


def _devices(member: np.ndarray, back: np.ndarray, accelerators: int, hosts: int) -> np.ndarray:
    """The device of each op, from the last device to the first; accelerators are numbered in pipeline order."""
    devices = np.full(member.shape[1], -1)
    at, k, h = len(member) - 1, accelerators, hosts
    while at:
        before, is_host = back[at, k, h]
        k, h = (k, h - 1) if is_host else (k - 1, h)
        devices[member[at] & ~member[before]] = accelerators + h if is_host else k
        at = before
    return devices
