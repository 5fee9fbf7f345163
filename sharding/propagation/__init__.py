"""The pass: from a few annotations to a spec for every value."""

from . import shardy
from .assignment import Assignment, Claim, Conflict, Reason
from .complete import complete, unannotated

__all__ = ["Assignment", "Claim", "Conflict", "Reason", "complete", "shardy", "unannotated"]
