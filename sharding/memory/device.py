"""`lower`: a completed program as one device runs it."""

from __future__ import annotations

from ..propagation import Assignment
from . import bodies
from .lowering import DeviceProgram, Handler, Lowering

HANDLERS: dict[str, Handler] = {
    "cond": bodies.cond,
    "custom_linear_solve": bodies.linear_solve,
    "scan": bodies.scan,
    "shard_map": bodies.shard_map,
    "while": bodies.while_,
}


def lower(assignment: Assignment, platform: str) -> DeviceProgram:
    """The program of an assignment on one device of a platform."""
    return Lowering(assignment, HANDLERS, platform).program()
