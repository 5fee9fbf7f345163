"""What the states of a model take, by the paper's formulas."""

from __future__ import annotations

from ..errors import ShardingError

STAGES = (0, 1, 2, 3)
"""Nothing is split; the optimizer's state is; gradients too; parameters too."""


def model_state_bytes(
    num_params: float,
    devices: int,
    stage: int,
    *,
    param_bytes: float = 2,
    gradient_bytes: float = 2,
    optimizer_bytes: float = 12,
) -> float:
    """Bytes of parameters, gradients and optimizer state on each device.

    Args:
        num_params: of the model.
        devices: over which they are split; with copies of the whole the devices of one.
        stage: 0 splits nothing, 1 the optimizer's state, 2 gradients too, 3 parameters too.
        param_bytes: of one parameter; 2 is half precision.
        gradient_bytes: of the gradient of one.
        optimizer_bytes: of the optimizer's state for one; 12 is Adam's in single precision with master weights.

    Raises:
        ShardingError: no such stage, or no devices.

    References:
        Rajbhandari et al., ZeRO, SC 2020 (1910.02054), sections 3 and 5 and table 1.
    """
    check_stage("zero.model_state_bytes", stage, STAGES)
    if devices < 1:
        raise ShardingError("zero.model_state_bytes(devices)", there=f"{devices}", must="at least 1")
    parts = [devices if stage >= first else 1 for first in (3, 2, 1)]
    sizes = (param_bytes, gradient_bytes, optimizer_bytes)
    return num_params * sum(size / over for size, over in zip(sizes, parts, strict=True))


def check_stage(asked: str, stage: int, stages: tuple[int, ...] = STAGES[1:]) -> None:
    """Raises where a number is no stage."""
    if stage not in stages:
        raise ShardingError(f"{asked}(stage)", there=repr(stage), must=f"one of {', '.join(map(str, stages))}")
