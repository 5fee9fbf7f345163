"""Annotate a few tensors with PartitionSpecs, see the inferred sharding of the rest and the reasons, and run it.

Example:
    >>> import jax
    >>> import sharding
    >>> from sharding import P
    >>> def loss(w, x):
    ...     return (x @ sharding.annotate(w, P(None, "tensor"))).mean()
    >>> step = sharding.jit(jax.value_and_grad(loss), in_shardings=(None, P("data")))
    >>> w, x = jax.ShapeDtypeStruct((16, 64), "float32"), jax.ShapeDtypeStruct((32, 16), "float32")
    >>> with sharding.mesh(data=2, tensor=4):
    ...     completion = step.complete(w, x)
    >>> completion.in_shardings, completion.out_shardings
    ((P(None, 'tensor'), P('data',)), (P(), P(None, 'tensor')))
    >>> completion.communication().by_kind()
    {'all-reduce': (3, 1032)}
"""

from typing import TYPE_CHECKING, Any

from jax.sharding import PartitionSpec as P

# isort: off
# By topic: annotations
from . import cost, explain, rules
from .annotations.annotate import annotate
from .annotations.axis_rules import axis_rules
from .annotations.layout import layout
from .annotations.prioritized import prioritized
from .annotations.same import same
from .annotations.propagation_barrier import barrier

# compiled functions and their completions
from .jit.jit import jit
from .comparison import Comparison, check_lock, compare
from .completion import Completion
from .errors import ShardingError

# meshes, global arrays and processes
from .cost import topology
from .mesh import mesh
from .distributed.global_arrays import put
from .distributed.initialize import initialize

# isort: on

if TYPE_CHECKING:
    from . import checkpoint, expert, kernels, pipeline, planner, remat, sequence, tensor, zero
    from .planner.plan_search import plan

__all__ = [
    "Comparison",
    "Completion",
    "P",
    "ShardingError",
    "annotate",
    "axis_rules",
    "barrier",
    "check_lock",
    "checkpoint",
    "compare",
    "cost",
    "expert",
    "explain",
    "initialize",
    "jit",
    "kernels",
    "layout",
    "mesh",
    "pipeline",
    "plan",
    "planner",
    "prioritized",
    "put",
    "remat",
    "rules",
    "same",
    "sequence",
    "tensor",
    "topology",
    "zero",
]

_LAZY = ("checkpoint", "expert", "kernels", "pipeline", "planner", "remat", "sequence", "tensor", "zero")


def __getattr__(name: str) -> Any:
    """Imports subpackages with heavy dependencies on first access (PEP 562)."""
    if name == "plan":
        from .planner.plan_search import plan

        return plan
    if name in _LAZY:
        import importlib

        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
