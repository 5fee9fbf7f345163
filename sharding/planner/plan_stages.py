"""Pipeline stages in a plan: versions of a step in stages are planned beside the step itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """The stages of a pipeline over a mesh axis.

    Example:
        >>> from sharding import planner
        >>> print(planner.Stages(count=4, schedule="1f1b", microbatches=8))
        4 stages over pipe by 1f1b, 8 microbatches
    """

    axis: str = "pipe"
    """Of the mesh, the major one."""
    count: int
    """The devices along the axis."""
    schedule: str = "1f1b"
    microbatches: int = 1

    def __str__(self) -> str:
        return f"{self.count} stages over {self.axis} by {self.schedule}, {self.microbatches} microbatches"


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A version of a step in pipeline stages, for `sharding.plan(..., staged=[...])`.

    Example:
        >>> import jax
        >>> from sharding import planner
        >>> x = jax.ShapeDtypeStruct((8, 8), "float32")
        >>> version = planner.Staged(step=lambda x: x + 1, args=(x,), stages=planner.Stages(count=2))
        >>> version.stages.axis
        'pipe'
    """

    step: Callable[..., Any]
    """As for `sharding.plan`."""
    args: tuple[Any, ...]
    """Its arguments, or ShapeDtypeStructs."""
    stages: Stages
