"""How long XLA takes to compile a program, roughly, and the repeated layers that would be compiled once in a `scan`.

The compile time grows with the ops of the program, each of which counts once however often a loop runs it, and hardly
with the mesh or the sizes of the arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from ..display.units import seconds_text
from ..graph import Graph, Op
from ..hardware import Platform


class Law(NamedTuple):
    """Seconds as `start + scale * ops ** power`."""

    start: float
    scale: float
    power: float


LAWS: Mapping[Platform, Law] = {"cpu": Law(0.5, 0.006, 1), "tpu": Law(1.5, 0.007, 1), "gpu": Law(0, 0.7, 0.5)}
"""Fitted to compiles on two shared cores (JAX 0.12.0.1): 129 train steps of decoders on XLA:CPU and 252 on v5p, 32 of
these and 36 programs of the corpus (140 to 16,000 ops) on an H100, whose compiler reuses the code of equal fusions.
Within a factor of three in 448 of 450. A TPU's largest programs take longer: GPT-3 scanned, 741 ops, 0.7 to 11 min."""

HEAVY = frozenset({"conv_general_dilated", "dot_general", "random_bits", "random_wrap", "sort"})
"""Ops by which repeated layers are recognised, in a train step or an initialisation."""
RANDOM = frozenset({"random_bits", "random_wrap"})
FEWEST_LAYERS = 3

Class = Literal["seconds", "tens of seconds", "minutes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedLayers:
    """Unrolled layers that run the same ops on arrays of the same shapes."""

    count: int
    ops_per_layer: int
    """Including the backward pass, if it is the part of the program that repeats."""
    source: str
    """The user's line of the first op that repeats."""
    is_initialisation: bool
    """Whether the layers draw random numbers."""

    def __str__(self) -> str:
        fix = (
            "stack their initialisation with `jax.vmap`" if self.is_initialisation else "stack and `jax.lax.scan` them"
        )
        return f"{self.count} equal layers at {self.source}: {fix}, and 1/{self.count} of their ops are compiled"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CompileTime:
    """A rough estimate of a program's compile time; prints with a hint where one helps."""

    platform: Platform
    num_ops: int
    """The ops that are compiled; those in the body of a loop count once."""
    layers: RepeatedLayers | None
    """Equal layers that are unrolled, if they are at least half of the program's heavy ops."""

    @property
    def seconds(self) -> float:
        """Seconds on two cores, to within a factor of three."""
        law = LAWS[self.platform]
        return law.start + law.scale * self.num_ops**law.power

    @property
    def rough(self) -> Class:
        """The order of magnitude: below 10 seconds, below 100, or longer."""
        return "seconds" if self.seconds < 10 else "tens of seconds" if self.seconds < 100 else "minutes"

    def __str__(self) -> str:
        line = f"compiles in {self.rough} on {self.platform} (about {seconds_text(self.seconds)}, {self.num_ops} ops)"
        return "\n".join([line, *([str(self.layers)] if self.layers else [])])

    __repr__ = __str__


def compile_time(graph: Graph, platform: Platform) -> CompileTime:
    """The compile time of a program on a platform."""
    live = graph.live_values
    ops = [op for op in graph.ops if op.name != "edge" and graph.is_live(op, live)]
    return CompileTime(platform=platform, num_ops=len(ops), layers=repeated_layers(graph, ops))


def repeated_layers(graph: Graph, ops: Sequence[Op]) -> RepeatedLayers | None:
    """The equal layers that most heavy ops belong to, if any: the longest periodic run of equal ones."""
    heavy = [k for k, op in enumerate(ops) if op.name in HEAVY]
    numbers: dict[tuple, int] = {}
    signatures = np.array([numbers.setdefault(_signature(graph, ops[k]), len(numbers)) for k in heavy])
    depths = _depths(ops)
    depth = np.array([k if ops[k].name in RANDOM else depths[ops[k].results[0]] for k in heavy])
    covered, period, start = max(
        (_longest_run(signatures, depth, period) for period in range(1, len(heavy) // FEWEST_LAYERS + 1)),
        key=lambda run: (run[0], -run[1]),
        default=(0, 1, 0),
    )
    count = round(covered / period)  # the ends of a gradient may lack an op
    if count < FEWEST_LAYERS or 2 * covered < len(heavy):
        return None
    first, last = heavy[start], heavy[start + (count - 1) * period]  # of the first layer and of the last one
    return RepeatedLayers(
        count=count,
        ops_per_layer=(last - first) // (count - 1),
        source=ops[first].source or "an unknown line",
        is_initialisation=all(ops[k].name in RANDOM for k in heavy[start : start + period]),
    )


def _signature(graph: Graph, op: Op) -> tuple:
    return op.name, op.times, op.source, *(graph.shapes[v] for v in (*op.operands, *op.results))


def _depths(ops: Sequence[Op]) -> dict[int, int]:
    """Value -> the number of heavy ops on the longest path to it: siblings, such as q, k and v, have the same."""
    found: dict[int, int] = {}
    for op in ops:
        depth = max((found.get(v, 0) for v in op.operands), default=0) + (op.name in HEAVY)
        found.update(dict.fromkeys(op.results, depth))
    return found


def _longest_run(signatures: np.ndarray, depths: np.ndarray, period: int) -> tuple[int, int, int]:
    """(number of ops, period, start) of the longest run of ops that equal those a period before, at another depth."""
    is_equal = (signatures[period:] == signatures[:-period]) & (depths[period:] != depths[:-period])
    equal = np.concatenate([[0], is_equal, [0]])
    edges = np.flatnonzero(np.diff(equal))
    if not len(edges):
        return 0, period, 0
    lengths = edges[1::2] - edges[::2]
    best = int(np.argmax(lengths))
    return int(lengths[best]) + period, period, int(edges[2 * best])
