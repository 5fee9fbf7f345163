"""The pass: from a few annotations to a spec for every value."""

from . import pending, shardy
from .assignment import Assignment, Claim, Conflict, Reason
from .complete import complete, unannotated
from .pending import PendingSum

__all__ = ["Assignment", "Claim", "Conflict", "PendingSum", "Reason", "complete", "pending", "shardy", "unannotated"]
