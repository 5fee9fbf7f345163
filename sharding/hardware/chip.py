"""What is known of one kind of chip: its rates, its memory and the links that leave it.

All numbers are per *device*, what JAX calls one: a chip has ``devices_per_chip`` of them, and a link that a chip's
devices share gives each its part.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

Platform = Literal["tpu", "gpu", "cpu"]

Link = Literal["ici", "nvlink", "shared memory", "network", "unknown"]
"""What joins the devices along a mesh axis; ``unknown`` where the devices are only a number."""

Precision = Literal["default", "high", "highest"]
"""How exactly a matmul of float32 is asked for, by `jax.default_matmul_precision` or `precision=`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Floating-point operations per second of one device; a multiply and an add are two.

    Those of the matrix unit are without sparsity. None: the matrix unit doesn't take the type, and it is computed in
    the next wider one that it takes.
    """

    bfloat16_flops_per_second: float
    """Matmuls of bfloat16 and float16."""
    float32_flops_per_second: float
    """Matmuls of float32 at JAX's default precision: one pass of bfloat16 on TPUs, TF32 on GPUs."""
    exact_float32_flops_per_second: float
    """Matmuls of float32 at precision "highest": six passes of bfloat16 on TPUs, the vector unit on GPUs."""
    int8_flops_per_second: float | None = None
    float8_flops_per_second: float | None = None
    vector_flops_per_second: float
    """Everything that is no matmul, in float32."""

    def shared(self, parts: float) -> Rates:
        """What is left for each of several devices that compute on the same cores at once."""
        return Rates(**{name: rate and rate / parts for name, rate in dataclasses.asdict(self).items()})

    def matmul_flops_per_second(self, dtype: str, precision: Precision = "default") -> float:
        """The rate of a matmul whose operands have that dtype."""
        if dtype in ("int8", "uint8", "int4", "uint4"):
            return self.int8_flops_per_second or self.bfloat16_flops_per_second
        if dtype.startswith(("float8", "float4")):
            return self.float8_flops_per_second or self.bfloat16_flops_per_second
        if dtype in ("bfloat16", "float16"):
            return self.bfloat16_flops_per_second
        if dtype in ("float32", "complex64"):
            return self.exact_float32_flops_per_second if precision == "highest" else self.float32_flops_per_second
        # float64 and wide integers have no unit on most of these chips: half of float32 on the vector unit.
        return self.vector_flops_per_second / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """What one device can send over one kind of link."""

    bytes_per_second: float
    """Over one link in one direction; the other direction carries as much at the same time."""
    num_links: int = 1
    """Links of one kind that leave the device: two per dim of a torus, the ports of an NVLink, ..."""
    latency_seconds: float
    """From a device to the next one, for a message of no length."""

    @property
    def total_bytes_per_second(self) -> float:
        """Over all links in one direction: what a device can send to others through a switch."""
        return self.bytes_per_second * self.num_links

    def shared(self, parts: int) -> Wire:
        """What is left for each of several devices that use the same links at once."""
        return dataclasses.replace(self, bytes_per_second=self.bytes_per_second / parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCollective:
    """What a collective was measured to take: `start_seconds` + bytes on the wire / `bytes_per_second`."""

    kind: str
    """As `sharding.cost.Kind` has it: all-gather, all-reduce, ..."""
    link: Link
    """What joined the devices."""
    num_devices: int
    """In one group."""
    start_seconds: float
    bytes_per_second: float
    """Of what `sharding.cost.wire_bytes` says that each device sends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One kind of accelerator chip, in the numbers its maker publishes or in those that were measured."""

    name: str
    """The name in a description, lower case."""
    platform: Platform
    """JAX's name for the platform."""
    devices_per_chip: int = 1
    """JAX devices on one chip."""
    memory_bytes: int | None
    """Memory of one device; None where it is the host's own."""
    memory_bytes_per_second: float
    """Reads and writes together."""
    rates: Rates
    link: Link
    """What joins the devices of one torus (TPU) or one host (GPU, CPU)."""
    wire: Wire
    """That link."""
    core_wire: Wire | None = None
    """What joins the devices of one chip, where it has several."""
    network: Wire
    """What joins hosts, or slices of TPUs: the part of it that one device has."""
    torus_dims: int = 0
    """Dims of the torus that the chips form; 0 where the shape is hosts x devices."""
    wraps_at: int = 0
    """Of a torus: a dim is a closed ring where its size is a multiple of this."""
    wraps_together: bool = False
    """Whether a ring is closed only where all dims of the slice can be."""
    op_seconds: float
    """What every op costs beside its work: a kernel launch, or a step of XLA's own runtime."""
    collective_seconds: float
    """What every collective costs beside its messages."""
    shares_cores: bool = False
    """Whether the devices of a host are threads over the same cores. The rates are then those with a core per device;
    a measured table has the rates per device while all run."""
    sends_while_computing: bool = True
    """Whether links work by themselves; cores do one after the other, also those of a measured table."""
    collectives: tuple[MeasuredCollective, ...] = ()
    """Measured ones, which go before the model of the links."""

    def on_cores(self, num_cores: int, num_devices: int) -> Chip:
        """The same where so many devices share the cores of a host, if that is what these devices do."""
        parts = num_devices / num_cores
        if not self.shares_cores or parts <= 1:
            return self
        memory = self.memory_bytes_per_second / parts
        return dataclasses.replace(self, rates=self.rates.shared(parts), memory_bytes_per_second=memory)
