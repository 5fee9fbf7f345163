"""Memory of model states per device, by the formulas of the ZeRO paper."""

from __future__ import annotations

from ..errors import ShardingError

STAGES = (0, 1, 2, 3)
"""Sharded: nothing; optimizer state; gradients too; parameters too."""


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
        num_params: number of parameters of the model.
        devices: number of devices to shard over; with replicas, the devices of one replica.
        stage: 0 shards nothing, 1 optimizer state, 2 gradients too, 3 parameters too.
        param_bytes: bytes per parameter; 2 is half precision.
        gradient_bytes: bytes of the gradient per parameter.
        optimizer_bytes: bytes of optimizer state per parameter; 12 is Adam in float32 with master weights.

    Raises:
        ShardingError: no such stage, or fewer than one device.

    References:
        Rajbhandari et al., ZeRO, SC 2020 (1910.02054), sections 3 and 5 and table 1.
    """
    check_stage("zero.model_state_bytes", stage, STAGES)
    if devices < 1:
        raise ShardingError("zero.model_state_bytes(devices)", found=f"{devices}", required="at least 1")
    shards = [devices if stage >= first else 1 for first in (3, 2, 1)]
    sizes = (param_bytes, gradient_bytes, optimizer_bytes)
    return num_params * sum(size / count for size, count in zip(sizes, shards, strict=True))


def check_stage(asked: str, stage: int, stages: tuple[int, ...] = STAGES[1:]) -> None:
    """Raises unless `stage` is one of `stages`."""
    if stage not in stages:
        raise ShardingError(f"{asked}(stage)", found=repr(stage), required=f"one of {', '.join(map(str, stages))}")
