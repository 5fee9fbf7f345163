"""Recomputation in the backward pass as a decision: which states are stored, and what runs again.

In: a chain of steps, equal or with costs and sizes, and a number of snapshots or bytes. Out: a `Schedule` to inspect,
plot and edit, and `scan` and `sequence`, whose derivatives follow it. Or in: a step of `sharding.jit` with blocks under
`jax.checkpoint(block, policy=auto)`, and a number of bytes per device. Out: what to keep, recompute and offload.

Example:
    >>> from sharding import remat
    >>> remat.revolve(100, snapshots=5).forwards, remat.sqrt(100).forwards
    (316, 190)
    >>> actions = [remat.Snapshot(0), remat.Advance(0, 1), remat.Record(1), remat.Backward(1), remat.Restore(0)]
    >>> remat.Schedule(name="mine", steps=2, actions=[*actions, remat.Backward(0), remat.Free(0)])
    mine: 2 steps, 2 forwards, 2 snapshots
      #  action       held
      0  snapshot 0      1
      1  advance 0-1     1
      2  record 1        2
      3  backward 1      1
      4  restore 0       1
      5  backward 0      1
      6  free 0          0
"""

from .actions import Action, Advance, Backward, Free, Place, Record, Restore, Snapshot
from .auto_policy import Auto, auto
from .budget import Fitted, fit, names
from .budget_search import Cost
from .chain import Chain
from .checkpoint_schedule import Schedule
from .disk_revolve import disk_revolve
from .layer_scan import scan
from .policy import Policy
from .revolve import revolve
from .rotor import rotor
from .selection import Selection, select
from .sequential import sequence
from .sublinear import chen, sqrt

__all__ = [
    "Action",
    "Advance",
    "Auto",
    "Backward",
    "Chain",
    "Cost",
    "Fitted",
    "Free",
    "Place",
    "Record",
    "Restore",
    "Policy",
    "Schedule",
    "Selection",
    "Snapshot",
    "auto",
    "chen",
    "disk_revolve",
    "fit",
    "names",
    "revolve",
    "rotor",
    "scan",
    "select",
    "sequence",
    "sqrt",
]
