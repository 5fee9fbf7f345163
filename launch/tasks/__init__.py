"""The models that the command line knows, by name: `tasks.find` and what is found builds the task."""

import dataclasses
import difflib
import math
from typing import Any

import jax

from sharding.errors import ShardingError

from ..config import ModelChoice, Optimization
from ..sequence_config import Sequencing
from ..task import Task
from . import bert, clicks, gpt, gpt_moe, images
from .family import Family

FAMILIES = (gpt.FAMILY, gpt_moe.FAMILY, bert.FAMILY, images.RESNET, images.VIT, clicks.FAMILY)

PRESETS = {name: family for family in FAMILIES for name in family.presets}


def find(choice: ModelChoice) -> tuple[Family, Any]:
    """The family of the model that `choice` names, and its configuration with the changes of `choice`."""
    if choice.name not in PRESETS:
        near = difflib.get_close_matches(choice.name, PRESETS, n=3, cutoff=0.3)
        raise ShardingError(
            f"--model {choice.name}",
            there="no model of this name",
            must=f"known models are {', '.join(PRESETS)}",
            fix=[f"--model {name}" for name in near],
        )
    family = PRESETS[choice.name]
    return family, _changed(choice, family.presets[choice.name])


def with_own_axes(axes: dict[str, int], family: Family) -> dict[str, int]:
    """The axes of a mesh and, of size 1 and behind them, those that the models of `family` need besides."""
    return axes | {name: 1 for name in family.axes if name not in axes}


def check_experts(name: str, model: Any, axes: dict[str, int]) -> None:
    """Raise an error if an axis is to split experts that it doesn't divide."""
    size, experts = axes.get("expert", 1), getattr(model, "num_experts", 0)
    if experts % size:
        raise ShardingError(
            f"--model {name} --mesh expert={size}",
            there=f"{experts} experts",
            must="each device of the axis has as many",
            fix=f"--mesh expert={math.gcd(experts, size)}",
        )


def check_reads_text(name: str, family: Family) -> None:
    """Raise an error if the models of `family` are not trained on text of the user's choice."""
    if family.text:
        return
    asked = f"--model {name} with --data, --tokenizer or --vocab"
    raise _other_models(
        "text", asked, "a model that has its own data", "models that predict the next token of any text"
    )


def check_sequence_parallel(
    name: str, family: Family, model: Any, optimization: Optimization, axes: dict[str, int]
) -> None:
    """Raise an error if an axis of tensor parallelism is to split the length of what it can't."""
    if not optimization.sequence_parallel:
        return
    size, asked = axes.get("tensor", 1), f"--model {name} --sequence-parallel"
    if not family.sequence_parallel:
        raise _other_models("sequence_parallel", asked, "a model without that", "models whose length can be split")
    if size == 1:
        mesh = ",".join(f"{axis}={size}" for axis, size in axes.items())
        must = "the axis tensor, which splits the branches, splits the length"
        raise ShardingError(asked, there=f"--mesh {mesh}", must=must, fix="--mesh tensor=2,...")
    over = {axis: axes[axis] for axis in ("seq", "tensor") if axes.get(axis, 1) > 1}
    if model.context % math.prod(over.values()):
        there = f"{model.context} positions over {', '.join(f'{axis}={size}' for axis, size in over.items())}"
        raise ShardingError(asked, there=there, must="each device gets as many positions", fix="another --mesh")


def check_splits_sequences(name: str, family: Family, sequencing: Sequencing | None) -> None:
    """Raise an error if an axis is to split sequences that the models of `family` have not."""
    if sequencing is None or family.sequences:
        return
    asked = f"--model {name} --mesh seq={sequencing.devices}"
    there = "a model whose attention, if it has any, is over whole sequences"
    raise _other_models("sequences", asked, there, "models whose sequences an axis may split")


def check_accumulates(task: Task, accumulate: int) -> None:
    """Raise an error if the gradient of a batch in parts would not be that of the whole."""
    if accumulate == 1 or not jax.tree.leaves(task.state_shapes.variables):
        return
    raise ShardingError(
        f"--model {task.name} --accumulate {accumulate}",
        there="norms over all examples of a batch, and their running averages",
        must="a batch in parts must give the gradient of the whole",
        fix=["--accumulate 1", "more devices for the batch"],
    )


def _other_models(what: str, asked: str, there: str, those: str) -> ShardingError:
    """That a model can't do what others can, whose families have `what`."""
    able = [preset for preset, family in PRESETS.items() if getattr(family, what)]
    return ShardingError(asked, there=there, must=f"{those} are {', '.join(able)}", fix=f"--model {able[0]}")


def _changed(choice: ModelChoice, preset: Any) -> Any:
    changes = choice.changes()
    known = [each.name for each in dataclasses.fields(preset)]
    unknown = [name for name in changes if name not in known]
    if unknown:
        raise ShardingError(
            f"--model {choice.name} with {', '.join('--' + name.replace('_', '-') for name in unknown)}",
            there=f"its configuration has {', '.join(known)}",
            must="a model can be changed only in what it has",
            fix=[f"leave --{name.replace('_', '-')} out" for name in unknown],
        )
    try:
        return dataclasses.replace(preset, **changes)
    except ValueError as error:
        raise ShardingError(f"--model {choice.name} with {changes}", there=str(error)) from None
