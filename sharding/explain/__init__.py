"""Predictions for a completed program before it compiles: collectives, memory, step time, and reasons for shardings.

In: an assignment of specs to every value. Out: ledgers, memory reports, estimates, lock files and an HTML report.

Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import sharding
    >>> from sharding import P, explain
    >>> def loss(w, x):
    ...     return jnp.mean((x @ w) ** 2)
    >>> shapes = jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct((128, 64), "float32")
    >>> with sharding.mesh(data=8, devices="v5p:2x2x2") as mesh:
    ...     assignment = sharding.jit(loss, in_shardings=(None, P("data"))).complete(*shapes).assignment
    ...     on = sharding.cost.topology(mesh)
    >>> explain.communication(assignment).by_kind()
    {'all-reduce': (1, 4)}
    >>> explain.memory(assignment).peak_bytes
    24580
    >>> explain.compile_time(assignment.graph, "tpu").rough
    'seconds'
    >>> f"{explain.estimate(assignment, on).seconds * 1e6:.1f} us"
    '11.0 us'
    >>> with sharding.mesh(data=8):
    ...     step = sharding.jit(loss, in_shardings=(None, P("data")))
    ...     compiled, completion = step.lower(*shapes).compile(), step.complete(*shapes)
    >>> ledger = explain.communication(completion.assignment).lowered("cpu")
    >>> explain.verify(ledger, explain.memory(completion.assignment), compiled).agrees
    True
"""

from .collective_ledger import Collective, Ledger
from .compile_time import CompileTime, RepeatedLayers, compile_time
from .largest_batch import LargestBatch, largest_batch
from .live_arrays import Array
from .lock_file import Lock
from .memory_fit import Fit
from .memory_report import AxisShare, MemoryReport, Moment, memory
from .predicted_collectives import communication
from .step_time import Estimate, estimate
from .unknown_ops import UnknownOp
from .verification import Verification, verify

__all__ = [
    "Array",
    "AxisShare",
    "Collective",
    "CompileTime",
    "Estimate",
    "Fit",
    "LargestBatch",
    "Ledger",
    "Lock",
    "MemoryReport",
    "Moment",
    "RepeatedLayers",
    "UnknownOp",
    "Verification",
    "communication",
    "compile_time",
    "estimate",
    "largest_batch",
    "memory",
    "verify",
]
