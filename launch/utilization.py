"""The estimate of a train step on accelerators, and the share of their peak that its matrix products reach (MFU)."""

from typing import Any

from jax.sharding import AbstractMesh, Mesh

from sharding import ShardingError
from sharding.display.units import seconds_text
from sharding.explain import Estimate
from sharding.mesh import platform


def estimate(completion: Any, mesh: Mesh | AbstractMesh) -> Estimate | None:
    """The estimate of a train step; None on CPUs, whose peak depends on the machine, and on unknown devices."""
    if platform(mesh) == "cpu":
        return None
    try:
        return completion.estimate()
    except ShardingError:
        return None


def summary(found: Estimate) -> str:
    """The step time, MFU and what bounds the step, in a line."""
    return f"estimated {seconds_text(found.seconds)} on {found.chip}, MFU {found.mfu:.1%}, bound by {found.bound_text}"
