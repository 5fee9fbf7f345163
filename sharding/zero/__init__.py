"""Optimizer state, gradients and parameters split over the devices that a batch is split over (ZeRO, FSDP).

Example:
    >>> from sharding import zero
    >>> zero.model_state_bytes(7.5e9, devices=64, stage=3) / 1e9
    1.875
"""

from .formula import model_state_bytes
from .optimizer import Master, Sharded, shard, split
from .specs import Specs, specs

__all__ = ["Master", "Sharded", "Specs", "model_state_bytes", "shard", "specs", "split"]
