"""Ahead-of-time compilation for described devices, and analysis of compiled HLO.

In: a compiled program or its HLO text. Out: its collectives with mesh axes, bytes and counts, and its peak memory.
"""

from .ahead_of_time import compile_only
from .collective_lowering import Lowered, lower_collective
from .collective_ops import KINDS, SUMS, Kind, Repeated, by_kind, wire_bytes
from .compiled_facts import CompiledCollective, CompiledFacts, CompiledMemory, read_compiled, read_hlo

__all__ = [
    "KINDS",
    "SUMS",
    "CompiledCollective",
    "CompiledFacts",
    "CompiledMemory",
    "Kind",
    "Lowered",
    "Repeated",
    "by_kind",
    "compile_only",
    "lower_collective",
    "read_compiled",
    "read_hlo",
    "wire_bytes",
]
