"""Sharding propagation: infers a spec for every value from a few annotations.

In: a `Graph` and mesh axis sizes. Out: an `Assignment` of specs, with reasons and conflicts.
"""

from . import partial_sums, shardy
from .assignment import POLICIES, Assignment, Given, Policy, Reason
from .conflict_report import Claim, Conflict
from .partial_sums import PendingSum
from .propagate import complete, unannotated

__all__ = [
    "POLICIES",
    "Assignment",
    "Given",
    "Claim",
    "Conflict",
    "PendingSum",
    "Policy",
    "Reason",
    "complete",
    "partial_sums",
    "shardy",
    "unannotated",
]
