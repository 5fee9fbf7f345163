"""What arrays are for: parameters, optimizer state, inputs, gradients, saved activations, temporaries.

The rules, in the order in which they are tried. They use what JAX records of transformations, and paths only where
there is no gradient:

- An argument is *state* if a result takes its place: by donation, or by the rest of its path (`state/w` and
  `out/0/w`).
- State of floats that the differentiated part of the program reads is *parameters*; other state is *optimizer state*.
  An argument of floats that is not state is parameters too if the backward pass makes a result of its shape, or, in a
  program without gradients, if its path says `params`, `parameters`, `model`, `weights` or `variables`.
- All other arguments are *inputs*.
- What the backward pass makes in the shape of a parameter, its dims in any order, is *gradients*.
- What the differentiated part makes and the backward pass reads is *saved activations*.
- The rest are *temporaries*; results that take no argument's place are *results*.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import numpy as np

from ..graph import Graph
from ..memory import Usage
from ..memory.instruction import Instruction, everywhere

Kind = Literal[
    "parameters", "optimizer state", "inputs", "gradients", "saved activations", "temporaries", "results", "gaps"
]
NAMES = frozenset("params parameters model weights variables".split())


def of_arguments(graph: Graph, usage: Usage) -> list[Kind]:
    """The kind of each argument of the program."""
    program = usage.program
    has_gradient = any(x.phase == "backward" for x in everywhere(program.body))
    forward = {x for one in program.body.instructions if one.phase == "forward" for x in one.operands}
    state = _state(graph, usage.aliases.values())
    made = {
        (graph.shapes[v], graph.dtypes[v])
        for v, x in zip(graph.outputs, program.outputs, strict=True)
        if x.phase == "backward"
    }
    kinds: list[Kind] = []
    for k, (v, x) in enumerate(zip(graph.inputs, program.inputs, strict=True)):
        trained = _is_float(graph, v) and x in forward
        if k in state:
            kinds.append("parameters" if trained else "optimizer state")
        elif has_gradient:
            kinds.append("parameters" if trained and (graph.shapes[v], graph.dtypes[v]) in made else "inputs")
        else:
            named = not NAMES.isdisjoint(graph.label(v).split("/"))
            kinds.append("parameters" if named and _is_float(graph, v) else "inputs")
    return kinds


def of_array(
    makers: Sequence[Instruction],
    readers: Mapping[Instruction, Collection[str]],
    shapes: Collection[tuple[int, ...]],
    graph: Graph,
) -> Kind:
    """The kind of an array that the program makes.

    Args:
        makers: what it is at the moment, and what its place is kept for.
        readers: the phases in which each instruction's result is read.
        shapes: of parameters, dims sorted.
        graph: the program's.
    """
    for x in makers:
        if x.phase == "backward" and x.value is not None and tuple(sorted(graph.shapes[x.value])) in shapes:
            return "gradients"
        if x.phase == "forward" and "backward" in readers.get(x, ()):
            return "saved activations"
    return "temporaries"


def _state(graph: Graph, donated: Collection[int]) -> set[int]:
    """The arguments whose place a result takes."""
    ends = {name.partition("/")[2].partition("/")[2]: v for name, v in graph.names.items() if v in set(graph.outputs)}
    outputs = set(graph.outputs)
    found = {*donated}
    for k, v in enumerate(graph.inputs):
        rest = graph.label(v).partition("/")[2]
        same = ends.get(rest) if rest else None
        alike = same is not None and (graph.shapes[same], graph.dtypes[same]) == (graph.shapes[v], graph.dtypes[v])
        if v in outputs or alike:
            found.add(k)
    return found


def _is_float(graph: Graph, v: int) -> bool:
    kind = getattr(graph.dtypes[v], "kind", "")
    return kind in ("f", "V", "c") and np.dtype(graph.dtypes[v]).itemsize > 0
