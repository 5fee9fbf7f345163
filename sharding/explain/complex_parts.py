"""Complex arrays on TPUs, whose compiler computes with their real and imaginary parts, as two arrays each.

It does so before it partitions. A product has three real products, of which each is reduced; or two, if only its real
or its imaginary part is read. Sums of other ops add pairs, which the partitioner doesn't know as sums: it gathers what
each device has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from ..graph import Graph, Op
from .collective_ledger import Collective

COMPLEX = "complex64"
"""The complex dtype of TPUs."""


def in_parts(collective: Collective, number: int = 2) -> Collective:
    """The collectives of the parts of a complex array, counted together."""
    count, size = number * collective.count, collective.result_bytes // 2
    return dataclasses.replace(collective, count=count, dtype="float32", result_bytes=size)


def sum_in_parts(collective: Collective, graph: Graph, v: int) -> Collective:
    """The collectives of the parts of a complex array that is the result of an op.

    Args:
        collective: of the array.
        graph: the program.
        v: the array.
    """
    op = graph.makers.get(v)
    if op is not None and op.name == "dot_general":
        return in_parts(collective, 2 if _is_read_in_part(graph, v) else 3)
    found = in_parts(collective)
    if op is None or op.name != "reduce_sum" or collective.kind != "all-reduce":
        return found
    return dataclasses.replace(found, kind="all-gather", result_bytes=found.result_bytes * collective.num_devices)


def _is_read_in_part(graph: Graph, v: int) -> bool:
    """Whether only the real part of a value is read, or only the imaginary one."""
    parts = {_part(graph, use) for use in _readers(graph, v)}
    return len(parts) == 1 and None not in parts


def _part(graph: Graph, use: Op) -> str | None:
    """The only part of a complex value that an op reads, if it reads one; a conversion to real reads the real part."""
    if use.name == "convert_element_type" and graph.dtype_names[use.results[0]] != COMPLEX:
        return "real"
    return use.name if use.name in ("imag", "real") else None


def _readers(graph: Graph, v: int) -> Iterator[Op]:
    """The ops that read a value, also behind annotations."""
    for use in graph.users.get(v, ()):
        if use.name == "annotate":
            yield from _readers(graph, use.results[0])
        else:
            yield use
