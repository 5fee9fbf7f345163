"""`OpGraph`: ops of any graph with their costs, for plans that are not limited to chains of layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ...errors import ShardingError, raise_together
from .downsets import Edges, check_edges

ASKED = "cutting.OpGraph"


@dataclass(frozen=True, kw_only=True)
class OpGraph:
    """Ops with their costs, and who reads whose result.

    Raises:
        ShardingError: no ops, lists of unequal lengths, negative numbers, unknown ops, a cycle.

    Example:
        >>> OpGraph(seconds=[2, 3], transfer=[1, 0], edges=[(0, 1)]).num_ops
        2
    """

    seconds: Sequence[float]
    """Of each op on an accelerator; inf where it can't run."""
    transfer: Sequence[float]
    """Time of each op's result to or from an accelerator, once per device, however many ops there read it."""
    edges: Edges
    num_bytes: Sequence[float] = ()
    """Memory of each op on an accelerator; empty is none."""
    host_seconds: Sequence[float] = ()
    """Of each op on a host, which has memory for all and transfers nothing; empty is inf."""
    together: Sequence[Sequence[int]] = field(default=())
    """Groups of ops that take the same device."""

    def __post_init__(self) -> None:
        num_ops = len(self.seconds)
        if not num_ops:
            raise ShardingError(f"{ASKED}(seconds)", found="no ops", required="at least one")
        object.__setattr__(self, "num_bytes", tuple(self.num_bytes) or (0.0,) * num_ops)
        object.__setattr__(self, "host_seconds", tuple(self.host_seconds) or (math.inf,) * num_ops)
        bad = []
        for name in ("seconds", "transfer", "num_bytes", "host_seconds"):
            values, may_be_infinite = getattr(self, name), name.endswith("seconds")
            if len(values) != num_ops:
                found = f"{len(values)} numbers for {num_ops} ops"
                bad.append(ShardingError(f"{ASKED}({name})", found=found, required="one per op"))
            required = "a non-negative number" + ", or inf" * may_be_infinite
            bad += [
                ShardingError(f"{ASKED}({name}[{op}])", found=f"{value!r}", required=required)
                for op, value in enumerate(values)
                if not (value >= 0 and (may_be_infinite or math.isfinite(value)))
            ]
        raise_together(ASKED, bad)
        check_edges(ASKED, num_ops, self.edges)
        if unknown := [op for group in self.together for op in group if not 0 <= op < num_ops]:
            raise ShardingError(f"{ASKED}(together)", found=f"op {unknown[0]}", required=f"ops below {num_ops}")

    @property
    def num_ops(self) -> int:
        """Number of ops."""
        return len(self.seconds)

    @property
    def reads(self) -> np.ndarray:
        """Whether an op reads another's result, bool [reader, op]."""
        reads = np.zeros((self.num_ops, self.num_ops), bool)
        for producer, consumer in self.edges:
            reads[consumer, producer] = True
        return reads

    def accelerator_loads(self, chosen: np.ndarray, memory_bytes: float = math.inf) -> np.ndarray:
        """What an accelerator with each of these sets of ops, bool [sets, ops], does per minibatch; inf if too much.

        The ops' times, and a transfer for each result that is read or sent:
        `sum of seconds + sum of transfer of ops outside that are read + of ops inside that are read outside`.
        """
        reads = self.reads.astype(float)
        received = ~chosen & (chosen @ reads > 0)
        sent = chosen & (~chosen @ reads > 0)
        loads = _sums(chosen, self.seconds) + (received | sent) @ np.asarray(self.transfer, float)
        return np.where(chosen @ np.asarray(self.num_bytes, float) <= memory_bytes, loads, np.inf)

    def host_loads(self, chosen: np.ndarray) -> np.ndarray:
        """What a host with each of these sets of ops does per minibatch."""
        return _sums(chosen, self.host_seconds)

    def classes(self) -> list[list[int]]:
        """Ops that take the same device and, with ops on paths between them, make contiguous sets: by the first op."""
        reach = np.eye(self.num_ops, dtype=bool) | self.reads
        for group in self.together:
            reach[np.ix_(group, group)] = True
        for op in range(self.num_ops):
            reach |= reach[:, [op]] & reach[op]
        mutual = reach & reach.T
        firsts = mutual.argmax(axis=1)
        return [np.flatnonzero(firsts == first).tolist() for first in np.unique(firsts)]


def _sums(chosen: np.ndarray, seconds: Sequence[float]) -> np.ndarray:
    """Sums over sets, of numbers that may be inf."""
    values = np.asarray(seconds, float)
    is_finite = np.isfinite(values)
    return np.where((chosen & ~is_finite).any(axis=1), np.inf, chosen @ np.where(is_finite, values, 0.0))
