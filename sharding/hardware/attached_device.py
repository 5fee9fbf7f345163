"""Devices that are attached, as JAX lists them."""

from typing import Protocol


class Device(Protocol):
    """The part of ``jax.Device`` used here; it has no public type for checkers."""

    @property
    def platform(self) -> str:
        """``"cpu"``, ``"gpu"`` or ``"tpu"``."""
        ...

    @property
    def process_index(self) -> int:
        """The index of the process that owns the device."""
        ...
