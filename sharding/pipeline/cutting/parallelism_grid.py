"""DistIR's grid search: data, tensor and pipeline degrees and microbatches, each combination simulated."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...errors import ShardingError
from ..schedules import one_f_one_b
from ..task_table import check_positive
from .device_clocks import DeviceOp, Value, interpret
from .even_stages import cut
from .layer_costs import check_bandwidths, check_layers

ASKED = "cutting.grid"


@dataclass(frozen=True, kw_only=True)
class GridPoint:
    """Degrees, and what a step with them takes."""

    data: int
    tensor: int
    stages: int
    microbatches: int
    seconds: float
    """Of a step."""
    peak_bytes: float
    """Of the device that needs most."""


@dataclass(frozen=True, kw_only=True)
class LayerChain:
    """Layers in model order; times and bytes are for a whole batch on one device."""

    forward: Sequence[float]
    backward: Sequence[float]
    activation_bytes: Sequence[float]
    """Of each layer's output."""
    weight_bytes: Sequence[float]
    """Gradients of each layer."""
    state_bytes: Sequence[float]
    """Weights, gradients and optimizer state of each layer."""
    batch: int
    """Examples: data degree times microbatches divides it."""
    bandwidth: float
    """Between any two devices, in bytes per unit of time."""
    launch: float = 0.0
    """Time of each layer's start, however little it does."""

    def __post_init__(self) -> None:
        names = "forward", "backward", "activation_bytes", "weight_bytes", "state_bytes"
        check_layers("cutting.LayerChain", **{name: getattr(self, name) for name in names})
        check_positive("cutting.LayerChain", batch=self.batch)
        check_bandwidths("cutting.LayerChain", bandwidth=self.bandwidth)


def grid(
    model: LayerChain, *, devices: int, microbatches: Sequence[int] = (1, 2, 4, 8, 16), memory_bytes: float = math.inf
) -> tuple[GridPoint, ...]:
    """All combinations of degrees that fit the memory, the fastest first.

    Degrees are powers of two whose product is the number of devices, with at most one stage per layer. Each is a
    program for `cutting.interpret`: even stages in 1F1B order, an all-reduce of each layer's output over the tensor
    degree forward and backward, transfers between stages, and an all-reduce of gradients at the end.

    Args:
        model: layers and links.
        devices: a power of two.
        microbatches: numbers to try.
        memory_bytes: of a device.

    Example:
        >>> layers = LayerChain(forward=[8.0] * 4, backward=[16.0] * 4, activation_bytes=[64.0] * 4,
        ...                     weight_bytes=[1e3] * 4, state_bytes=[8e3] * 4, batch=16, bandwidth=100.0)
        >>> best = grid(layers, devices=4)[0]
        >>> best.data, best.tensor, best.stages, best.microbatches
        (1, 2, 2, 16)

    Raises:
        ShardingError: devices that are no power of two, no microbatches that divide the batch, or nothing fits.

    References:
        Santhanam et al., "DistIR", 2021 (2111.05426), section 5.
    """
    check_positive(ASKED, devices=devices)
    if devices & (devices - 1):
        raise ShardingError(f"{ASKED}(devices={devices})", required="a power of two")
    for number in microbatches:
        check_positive(ASKED, microbatches=number)
    combinations = [
        (data, tensor, stages, number)
        for data, tensor, stages in degrees(devices)
        for number in dict.fromkeys(microbatches)
        if stages <= len(model.forward) and model.batch % (data * number) == 0
    ]
    if not combinations:
        found = f"no number of microbatches of {tuple(microbatches)} with a data degree that divide {model.batch}"
        raise ShardingError(f"{ASKED}(devices={devices})", found=found, required="one that does")
    points = [simulated(model, *combination) for combination in combinations]
    fitting = [point for point in points if point.peak_bytes <= memory_bytes]
    if not fitting:
        least = min(point.peak_bytes for point in points)
        raise ShardingError(
            f"{ASKED}(devices={devices}, memory_bytes={memory_bytes:,.0f})",
            found=f"{len(points)} combinations, each above that",
            required="one that fits",
            fix=f"memory_bytes={math.ceil(least)} or more",
        )
    return tuple(sorted(fitting, key=lambda point: point.seconds))


def degrees(devices: int) -> Iterator[tuple[int, int, int]]:
    """Data, tensor and pipeline degrees: powers of two with this product."""
    powers = devices.bit_length()
    for data in range(powers):
        for tensor in range(powers - data):
            yield 1 << data, 1 << tensor, devices >> (data + tensor)


def simulated(model: LayerChain, data: int, tensor: int, stages: int, microbatches: int) -> GridPoint:
    """A combination's step."""
    program = _Program(model, data, tensor, stages, microbatches)
    total = data * tensor * stages
    ran = interpret(list(program.ops()), devices=total, inputs=program.states())
    return GridPoint(
        data=data,
        tensor=tensor,
        stages=stages,
        microbatches=microbatches,
        seconds=ran.latency,
        peak_bytes=max(ran.peak_bytes),
    )


class _Program:
    """The ops of a step; device (replica, stage, shard) is number (replica * stages + stage) * tensor + shard."""

    def __init__(self, model: LayerChain, data: int, tensor: int, stages: int, microbatches: int):
        self.model, self.data, self.tensor, self.microbatches = model, data, tensor, microbatches
        times = [f + b for f, b in zip(model.forward, model.backward, strict=True)]
        self.layers = cut(times, stages=stages).layers

    def group(self, replica: int, stage: int) -> tuple[int, ...]:
        """The devices that share a stage."""
        first = (replica * len(self.layers) + stage) * self.tensor
        return tuple(range(first, first + self.tensor))

    def states(self) -> list[Value]:
        """What is live during the whole step."""
        return [
            Value(f"state {replica} {stage}", self._sum("state_bytes", stage) / self.tensor, self.group(replica, stage))
            for replica in range(self.data)
            for stage in range(len(self.layers))
        ]

    def ops(self) -> Iterator[DeviceOp]:
        """Forwards and backwards tick by tick, each with its transfer, then the reductions."""
        schedule = one_f_one_b(stages=len(self.layers), microbatches=self.microbatches)
        for row in schedule.ticks():
            tasks = [task for task in row if task is not None]
            for replica in range(self.data):
                yield from (self._task(replica, task.kind, task.stage, task.microbatch) for task in tasks)
            for replica in range(self.data):
                for task in tasks:
                    yield from self._transfer(replica, task.kind, task.stage, task.microbatch)
        for stage in range(len(self.layers)):
            seconds = self._all_reduce(self._sum("weight_bytes", stage) / self.tensor, self.data)
            for shard in range(self.tensor):
                yield DeviceOp(tuple(self.group(replica, stage)[shard] for replica in range(self.data)), seconds)

    def _task(self, replica: int, kind: str, stage: int, microbatch: int) -> DeviceOp:
        own, group = self.layers[stage], self.group(replica, stage)
        name = f"{replica} {microbatch} {stage}"
        share = self.data * self.microbatches
        seconds = self._sum(kind, stage) / share / self.tensor + len(own) * self.model.launch
        reduced = (self.model.activation_bytes[layer] / share for layer in own)
        seconds += sum(self._all_reduce(num_bytes, self.tensor) for num_bytes in reduced)
        if kind == "forward":
            kept = Value(f"activations {name}", self._sum("activation_bytes", stage) / share, group)
            return DeviceOp(group, seconds, (f"input {name}",) if stage else (), (kept,))
        reads = f"activations {name}", *((f"gradient {name}",) if stage < len(self.layers) - 1 else ())
        return DeviceOp(group, seconds, reads)

    def _transfer(self, replica: int, kind: str, stage: int, microbatch: int) -> Iterator[DeviceOp]:
        """Of activations to the next stage, or of their gradients to the one before."""
        other = stage + 1 if kind == "forward" else stage - 1
        if not 0 <= other < len(self.layers):
            return
        boundary = self.layers[min(stage, other)][-1]
        num_bytes = self.model.activation_bytes[boundary] / self.data / self.microbatches
        what = "input" if kind == "forward" else "gradient"
        received = Value(f"{what} {replica} {microbatch} {other}", num_bytes, self.group(replica, other))
        devices = self.group(replica, stage) + self.group(replica, other)
        yield DeviceOp(devices, num_bytes / self.model.bandwidth, (), (received,))

    def _sum(self, name: str, stage: int) -> float:
        return math.fsum(getattr(self.model, name)[layer] for layer in self.layers[stage])

    def _all_reduce(self, num_bytes: float, count: int) -> float:
        """Seconds of a ring over that many devices."""
        return 2 * num_bytes * (count - 1) / count / self.model.bandwidth
