"""Cost models: time of ops and collectives on a topology, discrete-event simulation of a step, and calibration.

In: local shapes, mesh axes and hardware. Out: FLOPs, bytes, seconds and timelines.

Example:
    >>> import jax
    >>> import sharding
    >>> from sharding import cost
    >>> with sharding.mesh(data=8, tensor=8, devices="v5p:4x4x4") as mesh:
    ...     on = cost.topology(mesh)
    >>> [(way.shape, way.size) for level in on.levels(["tensor"]) for way in level]  # one cost.Way per torus dim
    [('line', 2), ('ring', 4)]
    >>> f"{cost.collective_seconds('all-reduce', 1e9, 'tensor', on) * 1e3:.1f} ms"
    '6.9 ms'
    >>> cost.wire_bytes("all-reduce", 1_000_000, 8)
    1750000
    >>> cost.lower_collective("cpu", "reduce-scatter", "float32", 1024)
    Lowered(kind='all-reduce', dtype='float32', num_bytes=1024)
    >>> x = jax.ShapeDtypeStruct((1024, 1024), "bfloat16")
    >>> work = cost.work("add", [x, x], [x], {})
    >>> f"{work.read_bytes / 1e6:.1f} MB read, {cost.op_seconds(work, on.devices.chip) * 1e6:.1f} us"
    '4.2 MB read, 3.3 us'
    >>> dot = cost.Task(name="dot", stream="compute", seconds=2.0)
    >>> total = cost.Task(name="sum", stream="network", seconds=1.0, after=("dot",))
    >>> cost.simulate([dot, total]).makespan_seconds
    3.0
    >>> compiled = jax.jit(lambda x: x @ x).lower(x).compile()
    >>> cost.by_kind(cost.read_hlo(compiled.as_text()).collectives)
    {}
"""

from ..xla.ahead_of_time import compile_only
from ..xla.collective_lowering import Lowered, lower_collective
from ..xla.collective_ops import KINDS, SUMS, Kind, Repeated, by_kind, wire_bytes
from ..xla.compiled_facts import CompiledCollective, CompiledFacts, CompiledMemory, read_compiled, read_hlo
from .calibration import QUICK, Calibration, Effort, calibrate
from .collective_time import collective_seconds
from .op_time import Work, op_seconds, work
from .simulator import Span, Task, Timeline, simulate
from .topology import Topology, Way, topology

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
