"""Where a completed program reshards its values: all decisions after propagation, in order, for one platform."""

from __future__ import annotations

import dataclasses

from ..propagation import Assignment
from .gathered_updates import gathered_early
from .host_memory import resharded_on_device
from .reshard_placement import placed


def with_placed_reshards(assignment: Assignment, platform: str) -> Assignment:
    """The assignment with the specs that these decisions imply; also after annotations were added."""
    found = placed(assignment)
    if platform == "tpu":
        found = gathered_early(found)
    found = resharded_on_device(found)
    return dataclasses.replace(
        found,
        given=assignment.given and dataclasses.replace(assignment.given, platform=platform),
        with_annotations=lambda annotations: with_placed_reshards(assignment.with_annotations(annotations), platform),
    )
