"""`read`: problems from JSON files in the format of the ASPLOS 2025 contest on intra-operator parallelism.

`Problem.write` shows the format. Reference: Moffitt and Fegade, "The ASPLOS 2025 / EuroSys 2025 contest on
intra-operator parallelism for distributed deep learning" (doi 10.1145/3676642.3736399).
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ShardingError
from .problem import Problem


def read(path: str | Path) -> Problem:
    """The problem in a `.json` or `.json.gz` file.

    Example:
        >>> import pathlib, tempfile
        >>> from sharding import planner
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder) / "problem.json.gz"
        ...     planner.Problem.of([[3, 1]], name="small").write(path)
        ...     planner.read(path)
        Problem('small': 1 nodes, 2 strategies, 0 edges, no memory limit)

    Raises:
        ShardingError: the file is absent or not JSON, a key is missing, or the numbers don't fit together.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
        content = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    except (OSError, EOFError, ValueError) as error:
        required = "a JSON file, compressed if it ends with .gz"
        raise ShardingError(f"planner.read({str(path)!r})", found=str(error), required=required) from error
    try:
        return _problem(content)
    except (KeyError, TypeError, ValueError) as error:
        found = f"no key {error}" if isinstance(error, KeyError) else str(error)
        required = "problem.nodes.intervals, .costs, .usages and problem.edges.nodes, .costs, lists of numbers"
        raise ShardingError(f"planner.read({str(path)!r})", found=found, required=required) from error


def _problem(content: Any) -> Problem:
    content = content["problem"]
    nodes, edges = content["nodes"], content["edges"]
    return Problem.of(
        nodes["costs"],
        _edges(nodes["costs"], edges["nodes"], edges["costs"]),
        usages=nodes["usages"],
        intervals=nodes["intervals"],
        memory_bytes=content.get("usage_limit", math.inf),
        name=str(content.get("name", "")),
    )


def _edges(costs: list[list[float]], pairs: list[list[int]], matrices: list[list[float]]) -> Iterator[tuple]:
    """Edges of a problem; equal matrices are one array."""
    if len(pairs) != len(matrices):
        raise ValueError(f"edges: {len(pairs)} pairs of nodes, {len(matrices)} lists of costs")
    known: dict[tuple, np.ndarray] = {}
    for e, (pair, entries) in enumerate(zip(pairs, matrices, strict=True)):
        if len(pair) != 2 or not all(isinstance(i, int) and 0 <= i < len(costs) for i in pair):
            raise ValueError(f"edges.nodes[{e}] is {pair}, not two nodes below {len(costs)}")
        shape = len(costs[pair[0]]), len(costs[pair[1]])
        if len(entries) != math.prod(shape):
            raise ValueError(f"edges.costs[{e}] has {len(entries)} numbers, not {shape[0]} x {shape[1]}")
        key = (shape, tuple(entries))
        if key not in known:
            known[key] = np.asarray(entries, np.float64).reshape(shape)
        yield pair[0], pair[1], known[key]
