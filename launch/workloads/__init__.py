"""The models of the command line by preset name: `find` returns a model's family, whose `build` makes its workload.

In: model options. Out: a `Workload`.
"""

import dataclasses
import difflib
import math
from typing import Any

import jax

from sharding.errors import ShardingError

from ..config.model_config import ModelOptions
from ..config.optimizer_config import Optimization
from ..config.sequence_config import SequenceConfig
from ..workload import Workload
from . import bert_text, dlrm_clicks, gpt_moe_text, gpt_text, image_digits
from .model_family import Family

FAMILIES = (
    gpt_text.FAMILY,
    gpt_moe_text.FAMILY,
    bert_text.FAMILY,
    image_digits.RESNET,
    image_digits.VIT,
    dlrm_clicks.FAMILY,
)

PRESETS = {name: family for family in FAMILIES for name in family.presets}


def find(options: ModelOptions) -> tuple[Family, Any]:
    """The family of the model that `options` name, and its configuration with their changes."""
    if options.name not in PRESETS:
        near = difflib.get_close_matches(options.name, PRESETS, n=3, cutoff=0.3)
        raise ShardingError(
            f"--model {options.name}",
            found="no such model",
            required=f"one of {', '.join(PRESETS)}",
            fix=[f"--model {name}" for name in near],
        )
    family = PRESETS[options.name]
    return family, _changed(options, family.presets[options.name])


def with_required_axes(axes: dict[str, int], family: Family) -> dict[str, int]:
    """The axes of a mesh, followed by axes of size 1 that the models of `family` need and the mesh lacks."""
    return axes | {name: 1 for name in family.axes if name not in axes}


def check_experts(name: str, model: Any, axes: dict[str, int]) -> None:
    """Raise an error if the axis `expert` does not divide the number of experts."""
    size, experts = axes.get("expert", 1), getattr(model, "num_experts", 0)
    if experts % size:
        raise ShardingError(
            f"--model {name} --mesh expert={size}",
            found=f"{experts} experts",
            required="equally many experts per device of the axis expert",
            fix=f"--mesh expert={math.gcd(experts, size)}",
        )


def check_text(name: str, family: Family) -> None:
    """Raise an error if the models of `family` can't be trained on the user's text."""
    if family.text:
        return
    asked = f"--model {name} with --data, --tokenizer or --vocab"
    raise _unsupported("text", asked, "a model with fixed training data", "a model that predicts the next token")


def check_sequence_parallel(
    name: str, family: Family, model: Any, optimization: Optimization, axes: dict[str, int]
) -> None:
    """Raise an error if the residual stream can't be sharded along its length as requested."""
    if not optimization.sequence_parallel:
        return
    size, asked = axes.get("tensor", 1), f"--model {name} --sequence-parallel"
    if not family.sequence_parallel:
        raise _unsupported(
            "sequence_parallel",
            asked,
            "a model without sequence parallelism",
            "a model that supports sequence parallelism",
        )
    if size == 1:
        mesh = ",".join(f"{axis}={size}" for axis, size in axes.items())
        raise ShardingError(
            asked,
            found=f"--mesh {mesh}",
            required="an axis tensor larger than 1; sequence parallelism shards over it",
            fix="--mesh tensor=2,...",
        )
    over = {axis: axes[axis] for axis in ("seq", "tensor") if axes.get(axis, 1) > 1}
    if model.context % math.prod(over.values()):
        raise ShardingError(
            asked,
            found=f"{model.context} positions over {', '.join(f'{axis}={size}' for axis, size in over.items())}",
            required="equally many positions per device",
            fix="another --mesh",
        )


def check_sequence_axis(name: str, family: Family, sequence_config: SequenceConfig | None) -> None:
    """Raise an error if the models of `family` don't support the axis `seq` of the mesh."""
    if sequence_config is None or family.sequences:
        return
    raise _unsupported(
        "sequences",
        f"--model {name} --mesh seq={sequence_config.devices}",
        "a model without sequence-parallel attention",
        "a model with sequence-parallel attention",
    )


def check_accumulation(workload: Workload, accumulate: int) -> None:
    """Raise an error if gradient accumulation would change the gradient of a batch."""
    if accumulate == 1 or not jax.tree.leaves(workload.state_shapes.variables):
        return
    raise ShardingError(
        f"--model {workload.name} --accumulate {accumulate}",
        found="batch norms, whose statistics depend on the full batch",
        required="a loss whose microbatches give the gradient of the full batch",
        fix=["--accumulate 1", "more devices for the batch"],
    )


def _unsupported(feature: str, asked: str, found: str, required: str) -> ShardingError:
    """The error for a model whose family lacks `feature`; lists the models that have it."""
    able = [preset for preset, family in PRESETS.items() if getattr(family, feature)]
    return ShardingError(asked, found=found, required=f"{required}: one of {', '.join(able)}", fix=f"--model {able[0]}")


def _changed(options: ModelOptions, preset: Any) -> Any:
    changes = options.changes()
    known = [field.name for field in dataclasses.fields(preset)]
    unknown = [name for name in changes if name not in known]
    if unknown:
        raise ShardingError(
            f"--model {options.name} with {', '.join('--' + name.replace('_', '-') for name in unknown)}",
            found=f"its configuration has {', '.join(known)}",
            required="options that the model has",
            fix=[f"leave --{name.replace('_', '-')} out" for name in unknown],
        )
    try:
        return dataclasses.replace(preset, **changes)
    except ValueError as error:
        raise ShardingError(f"--model {options.name} with {changes}", found=str(error)) from None
