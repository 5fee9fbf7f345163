"""What a completed program costs: its collectives and its time, and what XLA made of it."""

from .ahead_of_time import compile_only
from .calibration import QUICK, Calibration, Effort, calibrate
from .collective import KINDS, SUMS, Kind, Repeated, by_kind, wire_bytes
from .compiled import CompiledCollective, CompiledFacts, CompiledMemory, read_compiled, read_hlo
from .duration import collective_seconds
from .lowered import Lowered, lower_collective
from .simulator import Span, Task, Timeline, simulate
from .topology import Topology, Way, topology
from .work import Work, op_seconds, work

__all__ = [
    "KINDS",
    "QUICK",
    "SUMS",
    "Calibration",
    "CompiledCollective",
    "CompiledFacts",
    "CompiledMemory",
    "Effort",
    "Kind",
    "Lowered",
    "Repeated",
    "Span",
    "Task",
    "Timeline",
    "Topology",
    "Way",
    "Work",
    "by_kind",
    "calibrate",
    "collective_seconds",
    "compile_only",
    "lower_collective",
    "op_seconds",
    "read_compiled",
    "read_hlo",
    "simulate",
    "topology",
    "wire_bytes",
    "work",
]
