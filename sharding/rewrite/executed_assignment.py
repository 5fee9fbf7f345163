"""The assignment by which a program runs, where that differs from the completed one."""

from __future__ import annotations

from ..propagation import Assignment
from .invariant_reshards import resharded_before_loops
from .unread_gathers import without_unread_gathers


def executed(assignment: Assignment) -> Assignment:
    """The assignment without unread all-gathers, and with loop invariants resharded before their loops."""
    return assignment.once("executed", lambda: resharded_before_loops(without_unread_gathers(assignment.as_run)))
