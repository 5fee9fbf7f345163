"""A model family: the presets of one architecture and how their workloads are built."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..config.optimizer_config import Optimization
from ..config.train_config import Recipe
from ..workload import Workload


class BuildWorkload(Protocol):
    """Builds the workload of a model with this configuration.

    Args:
        name: the model's name.
        config: its configuration.
        optimization: how it is trained.
        steps: total training steps.
        seed: seed of the randomness inside a step.
        sample: tokens that its sampler generates, if it has one.
    """

    def __call__(
        self, name: str, config: Any, optimization: Optimization, *, steps: int, seed: int, sample: int = 0
    ) -> Workload: ...


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture: its presets by name, their default training settings, and their workloads."""

    presets: Mapping[str, Any]
    recipe: Callable[[str], Recipe] = field(default=lambda name: Recipe())
    build: BuildWorkload
    axes: tuple[str, ...] = ()
    """Mesh axes that its models need, possibly of size 1."""
    sequences: bool = False
    """Whether its models support sequences sharded over the axis `seq`."""
    text: bool = False
    """Whether its models predict the next token of any text: batches [B, S + 1], a configuration with `vocab` and
    `context`."""
    sequence_parallel: bool = False
    """Whether its models support a residual stream sharded along its length; a configuration with `context`."""
