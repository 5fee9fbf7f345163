"""Categories of arrays: parameters, optimizer state, inputs, gradients, saved activations, temporaries.

The rules, in order of precedence. They use JAX's record of transformations, and paths only in programs without
gradients:

- An argument is *state* if a result replaces it: it is donated, or a result has the rest of its path (`state/w` and
  `out/0/w`).
- Floating-point state that the forward pass reads is *parameters*; other state is *optimizer state*. A floating-point
  argument that is not state is also parameters if the backward pass produces a result of its shape, or, in a program
  without gradients, if its path contains `params`, `parameters`, `model`, `weights` or `variables`.
- All other arguments are *inputs*.
- An array that the backward pass produces in the shape of a parameter, its dims in any order, is *gradients*.
- An array that the forward pass produces and the backward pass reads is *saved activations*.
- The rest are *temporaries*; outputs that reuse no argument's memory are *results*.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import numpy as np

from ..graph import Graph
from ..memory import Usage
from ..memory.instruction import Instruction, all_instructions

Category = Literal[
    "parameters", "optimizer state", "inputs", "gradients", "saved activations", "temporaries", "results", "gaps"
]
NAMES = frozenset("params parameters model weights variables".split())


def of_arguments(graph: Graph, usage: Usage) -> list[Category]:
    """The category of each argument of the program."""
    program = usage.program
    has_gradient = any(x.phase == "backward" for x in all_instructions(program.body))
    forward = {x for one in program.body.instructions if one.phase == "forward" for x in one.operands}
    state = _state(graph, usage.aliases.values())
    made = {
        (graph.shapes[v], graph.dtypes[v])
        for v, x in zip(graph.outputs, program.outputs, strict=True)
        if x.phase == "backward"
    }
    categories: list[Category] = []
    for k, (v, x) in enumerate(zip(graph.inputs, program.inputs, strict=True)):
        trained = _is_float(graph, v) and x in forward
        if k in state:
            categories.append("parameters" if trained else "optimizer state")
        elif has_gradient:
            categories.append("parameters" if trained and (graph.shapes[v], graph.dtypes[v]) in made else "inputs")
        else:
            named = not NAMES.isdisjoint(graph.label(v).split("/"))
            categories.append("parameters" if named and _is_float(graph, v) else "inputs")
    return categories


def of_array(
    makers: Sequence[Instruction],
    readers: Mapping[Instruction, Collection[str]],
    shapes: Collection[tuple[int, ...]],
    graph: Graph,
) -> Category:
    """The category of an array that the program computes.

    Args:
        makers: the instruction that wrote the buffer last, and those that will reuse it.
        readers: the phases that read each instruction's result.
        shapes: shapes of the parameters, dims sorted.
        graph: the program.
    """
    for x in makers:
        if x.phase == "backward" and x.value is not None and tuple(sorted(graph.shapes[x.value])) in shapes:
            return "gradients"
        if x.phase == "forward" and "backward" in readers.get(x, ()):
            return "saved activations"
    return "temporaries"


def _state(graph: Graph, donated: Collection[int]) -> set[int]:
    """The arguments that a result replaces."""
    outputs = set(graph.outputs)
    ends = {name.partition("/")[2].partition("/")[2]: v for name, v in graph.names.items() if v in outputs}
    found = {*donated}
    for k, v in enumerate(graph.inputs):
        rest = graph.label(v).partition("/")[2]
        new = ends.get(rest) if rest else None
        is_replaced = new is not None and (graph.shapes[new], graph.dtypes[new]) == (graph.shapes[v], graph.dtypes[v])
        if v in outputs or is_replaced:
            found.add(k)
    return found


def _is_float(graph: Graph, v: int) -> bool:
    kind = getattr(graph.dtypes[v], "kind", "")
    return kind in ("f", "V", "c") and np.dtype(graph.dtypes[v]).itemsize > 0
