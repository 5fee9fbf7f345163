"""Machines with fast links inside and slow links between them: transfer and all-reduce times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..task_table import check_positive
from .layer_costs import check_bandwidths


@dataclass(frozen=True, kw_only=True)
class Machines:
    """Identical machines; device d is on machine d // devices."""

    machines: int
    devices: int
    """Per machine."""
    inside: float
    """Bandwidth between devices of a machine, in bytes per unit of time."""
    between: float
    """Bandwidth between devices of different machines."""

    def __post_init__(self) -> None:
        check_positive("cutting.Machines", machines=self.machines, devices=self.devices)
        check_bandwidths("cutting.Machines", inside=self.inside, between=self.between)

    @property
    def total(self) -> int:
        """Devices of all machines."""
        return self.machines * self.devices

    def bandwidth(self, *devices: int) -> float:
        """Bandwidth between these devices: ``inside`` if all are on one machine."""
        return self.inside if len({device // self.devices for device in devices}) == 1 else self.between


def transfer_time_per_byte(machines: Machines, senders: Sequence[int], receivers: Sequence[int]) -> float:
    """Transfer time per byte of a microbatch's activations between two stages, or of its gradients back.

    The microbatch is sharded evenly over the devices of each stage, in their order. All links work concurrently; the
    busiest device determines the time.
    """
    num_pairs = len(senders) * len(receivers)
    busy = dict.fromkeys([*senders, *receivers], 0.0)  # in units of 1 / num_pairs
    for i, sender in enumerate(senders):
        for j, receiver in enumerate(receivers):
            common = min((i + 1) * len(receivers), (j + 1) * len(senders)) - max(i * len(receivers), j * len(senders))
            if common > 0:
                busy[sender] += common / machines.bandwidth(sender, receiver)
                busy[receiver] += common / machines.bandwidth(sender, receiver)
    return max(busy.values()) / num_pairs


def all_reduce_time_per_byte(machines: Machines, devices: Sequence[int]) -> float:
    """Ring all-reduce time per byte of gradients over a stage's m devices: 2 (m - 1) / m over the slowest link."""
    return 2 * (len(devices) - 1) / len(devices) / machines.bandwidth(*devices)
