"""Models that outgrow one chip: annotate a few tensors on a mesh, see how the rest is split and why, run it.

with sharding.mesh(data=2, tensor=4):
    step = sharding.jit(train_step, donate_argnums=(0,))
    print(step.complete(state, batch))
    state, loss = step(state, batch)
"""

from typing import TYPE_CHECKING, Any

from jax.sharding import PartitionSpec as P

# isort: off
# By topic: what one says
from . import cost, explain, rules
from .annotation import annotate
from .logical import axis_rules
from .group import same
from .barrier import barrier

# what one gets
from .jit import jit
from .comparison import Comparison, check_lock, compare
from .completion import Completion
from .errors import ShardingError

# where it runs
from .mesh import mesh, topology
from .placement import put
from .initialize import initialize

# isort: on

if TYPE_CHECKING:
    from . import checkpoint, expert, pipeline, sequence, tensor, zero

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
    "mesh",
    "pipeline",
    "put",
    "rules",
    "same",
    "sequence",
    "tensor",
    "topology",
    "zero",
]

_LAZY = ("checkpoint", "expert", "pipeline", "sequence", "tensor", "zero")


def __getattr__(name: str) -> Any:
    """Rooms that load heavy packages come when they are first touched (PEP 562)."""
    if name in _LAZY:
        import importlib

        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
