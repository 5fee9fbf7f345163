"""What a model's layers keep for their backward pass, chosen so that a train step fits in memory."""

import dataclasses
from collections.abc import Callable
from typing import Any

from sharding import remat
from sharding.errors import ShardingError
from sharding.planner import Plan

from ..models.remat_policy import NAMES
from .config.optimizer_config import Optimization

GROUPS = 4
"""Unrolled layers are chosen in this many groups; scanned ones all alike, as they are one program."""

Step = tuple[Any, tuple[Any, Any]]
"""A jitted train step, and its abstract arguments."""


def check(name: str, model: Any, optimization: Optimization, option: str) -> None:
    """Raise an error if the recomputation of a model's layers can't be chosen."""
    if not _recomputes(model):
        raise ShardingError(
            f"--model {name} {option}",
            found="a model without recomputation",
            required="layers whose recomputation can be chosen",
            fix=["--model gpt-tiny", f"leave {option} out"],
        )
    if optimization.pipeline is not None:
        raise ShardingError(
            f"--mesh pipe={optimization.pipeline.devices} {option}",
            found="a pipeline, whose schedule decides what a stage keeps",
            required="layers that are not pipelined",
            fix=["--remat", f"leave {option} out"],
        )


def fit(model: Any, step: Callable[[Any], Step], memory_bytes: int) -> tuple[Any, remat.Fitted]:
    """The configuration of a model whose step fits in memory on the mesh in context, and what was chosen.

    On described devices it fits as predicted, on others as compiled.

    Args:
        model: its configuration.
        step: the train step of a configuration.
        memory_bytes: per device.

    Raises:
        ShardingError: no choice fits, with the least memory that one does.
    """
    chosen = automatic(model)
    jitted, args = step(chosen)
    names = [name for name in remat.names(jitted, *args) if name in NAMES]
    fitted = remat.fit(jitted, *args, memory_bytes=memory_bytes, names=names)
    return dataclasses.replace(model, remat=tuple(fitted.policies[auto.group] for auto in chosen.remat)), fitted


def automatic(model: Any) -> Any:
    """The configuration of a model with the recomputation of its layers to be chosen; unchanged if it has none."""
    if not _recomputes(model):
        return model
    groups = 1 if model.scan else min(GROUPS, model.layers)
    return dataclasses.replace(model, remat=tuple(remat.auto[k] for k in range(groups)))


def as_planned(model: Any, plan: Plan) -> Any:
    """The configuration of a model whose layers keep what a plan says when its step is traced."""
    if plan.stages is not None:
        return model
    if plan.keeps_everything and _recomputes(model):
        return dataclasses.replace(model, remat=False)
    return automatic(model)


def _recomputes(model: Any) -> bool:
    return any(field.name == "remat" for field in dataclasses.fields(model))
