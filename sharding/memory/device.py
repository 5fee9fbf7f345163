"""`lower`: a completed program as one device runs it."""

from __future__ import annotations

from ..propagation import Assignment
from . import bodies
from .lowering import DeviceProgram, Handler, Limit, Lowering

HANDLERS: dict[str, Handler] = {
    "cond": bodies.cond,
    "custom_linear_solve": bodies.linear_solve,
    "scan": bodies.scan,
    "shard_map": bodies.shard_map,
    "while": bodies.while_,
}


def lower(assignment: Assignment, limit: Limit | None = None) -> DeviceProgram:
    """The program of an assignment on one device.

    Args:
        assignment: a spec per value.
        limit: where ops have to be split otherwise while they run; every op as it comes if not given.
    """
    return Lowering(assignment, HANDLERS, limit).program()
