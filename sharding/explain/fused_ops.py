"""What XLA fuses: arrays that are never stored, reads that a kernel makes once for several ops, slices that are copied.

By the kinds of ops alone, in program order, which takes a pass over the program. The memory report has the kernels
themselves (`memory/fusion.py`), of a program lowered for one platform.
"""

from __future__ import annotations

from ..cost.flops import MATMULS
from ..graph import Graph, Op
from ..hardware import Platform
from ..rules.rule_table import ELEMENTWISE

FUSED = ELEMENTWISE | {"broadcast_in_dim", "iota", "reshape", "squeeze"}
"""Ops that XLA fuses into their consumers."""
NO_WORK = frozenset({"annotate", "barrier", "edge", "same", "scan xs", "scan ys", "shard_map"})
"""Ops that only constrain shardings; for slices of what a scan stacks see `slice_passes`."""
COPY, ZEROS = 2, 1
"""Passes over a slice: a copy reads and writes it, zeros are written."""


def never_stored(graph: Graph, platform: Platform) -> frozenset[int]:
    """Values that are never stored, as XLA fuses their ops into the consumers; found once for all shardings.

    On GPUs and TPUs products round their results themselves, where only the rounded ones are read.
    """
    return graph.once(f"never stored on {platform}", lambda: _never_stored(graph, platform))


def _never_stored(graph: Graph, platform: Platform) -> frozenset[int]:
    stored = {*graph.inputs, *graph.outputs}
    for op in graph.ops:
        if op.name not in FUSED:
            if platform == "cpu" or not _is_rounded(graph, op):
                stored.update(op.results)
            if not _reduces(op):
                stored.update(v for v in op.operands if v in graph.makers)
    return frozenset(range(len(graph.shapes))) - stored


def read_by_siblings(graph: Graph, platform: Platform) -> dict[int, set[int]]:
    """Op, by id -> operands that it needn't read from memory, though they are stored; found once for all shardings.

    XLA:GPU and XLA:TPU fuse elementwise ops that read the same arrays into one kernel with several results, such as
    Adam's update. Counted as one are those without another kernel between them in program order.
    """
    if platform == "cpu":
        return {}
    return graph.once(f"read by siblings on {platform}", lambda: _read_by_siblings(graph, platform))


def _read_by_siblings(graph: Graph, platform: Platform) -> dict[int, set[int]]:
    fused = never_stored(graph, platform)
    found: dict[int, set[int]] = {}
    known, times = set[int](), 1  # values that the kernel has in registers
    for op in graph.ops:
        if op.name in NO_WORK:
            continue
        if op.name not in FUSED or op.times != times:
            known, times = set(), op.times
        if op.name in FUSED:
            if again := known.intersection(op.operands) - fused:
                found[id(op)] = again
            known.update(op.operands, op.results)
    return found


def slice_passes(graph: Graph, platform: Platform) -> dict[int, int]:
    """Op that takes a slice of what a scan stacks, or adds one, by id -> how often XLA:GPU reads or writes the slice;
    empty on other platforms, found once for all shardings.

    Kernels of libraries don't read slices of a stack, so these are copied out of it; nor do they write them. Stacked
    results begin as zeros.
    """
    return graph.once("slice passes", lambda: _slice_passes(graph)) if platform == "gpu" else {}


def _slice_passes(graph: Graph) -> dict[int, int]:
    others = FUSED | NO_WORK

    def is_read_by_library(v: int) -> bool:
        return any(op.name not in others for op in graph.users.get(v, ()))

    found: dict[int, int] = {}
    for op in graph.ops:
        if op.name == "scan xs":
            found[id(op)] = COPY * is_read_by_library(op.results[0])
        elif op.name == "scan ys":
            (v,) = op.operands
            is_written = v in graph.makers and graph.makers[v].name in FUSED and not is_read_by_library(v)
            found[id(op)] = ZEROS + COPY * (not is_written)
    return found


def _is_rounded(graph: Graph, op: Op) -> bool:
    """Whether an op is a product of which only the result in a narrower dtype is read."""
    users = [*graph.users.get(op.results[0], ())] if op.name in MATMULS else []
    if [user.name for user in users] != ["convert_element_type"]:
        return False
    return graph.itemsize(users[0].results[0]) < graph.itemsize(op.results[0])


def _reduces(op: Op) -> bool:
    return op.name.startswith("reduce_") or op.name == "annotate"
