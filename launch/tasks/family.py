"""What every model of one architecture has in common for the command line."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..config import Optimization, Recipe
from ..task import Task


class Build(Protocol):
    """Makes the task of training a model with this configuration for `steps` steps.

    Args:
        name: of the model.
        config: its configuration.
        optimization: of its training.
        steps: of its training.
        seed: of all that is random inside a step.
        sample: how many tokens its sampler makes, if it has one.
    """

    def __call__(
        self, name: str, config: Any, optimization: Optimization, *, steps: int, seed: int, sample: int = 0
    ) -> Task: ...


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture: its models by name, how they are trained by default, and what makes a task of one."""

    presets: Mapping[str, Any]
    recipe: Callable[[str], Recipe] = field(default=lambda name: Recipe())
    build: Build
    axes: tuple[str, ...] = ()
    """That a mesh for its models has, be they of size 1."""
    sequences: bool = False
    """Whether an axis may split the sequences of its models."""
    text: bool = False
    """Whether its models predict the next token of any text: batches [B, S + 1], and a configuration with `vocab` and
    `context`."""
    sequence_parallel: bool = False
    """Whether the residual stream of its models can be split on its length; a configuration with `context`."""
