"""Makes a choice fit: one node at a time takes a smaller strategy at the time that exceeds the limit most."""

from __future__ import annotations

import numpy as np

from .core_problem import Core
from .forests import Rows

MOST_MOVES = 500


def fit(core: Core, costs: np.ndarray, choice: np.ndarray) -> bool:
    """Changes a choice in place until it fits, by the moves that cost least per byte; whether it does.

    Args:
        core: whose memory counts.
        costs: of all strategies, end to end, with prices for memory, so that other times count, too.
        choice: int [nodes].
    """
    arcs, memory = core.arcs, core.memory
    everything = np.arange(len(arcs.source))
    rows = Rows.of(arcs, everything, arcs.start)
    node_of = np.repeat(np.arange(len(arcs.sizes)), arcs.sizes)
    first = arcs.offsets[:-1]
    for _ in range(MOST_MOVES):
        excess = core.excess(choice)
        at = int(np.argmax(excess)) if len(excess) else 0
        if not len(excess) or excess[at] <= 0:
            return True
        local = costs + np.bincount(rows.column, rows.of_choice(arcs.values, choice), len(costs))
        alive = ((memory.first <= at) & (at < memory.end))[memory.part]
        used = np.bincount(memory.column[alive], memory.usages[alive], len(costs))
        now = (first + choice)[node_of]
        saved = np.minimum(used[now] - used, excess[at])
        ratio = np.where(saved > 0, (local - local[now]) / np.where(saved > 0, saved, 1.0), np.inf)
        best = int(np.argmin(ratio))
        if not np.isfinite(ratio[best]):
            return False
        choice[node_of[best]] = best - first[node_of[best]]
    return False
