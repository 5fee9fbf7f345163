"""Hardware model of a chip: compute rates, memory and links.

All numbers are per JAX *device*: a chip has ``devices_per_chip`` of them, which share its links equally.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

Platform = Literal["tpu", "gpu", "cpu"]

Link = Literal["ici", "nvlink", "shared memory", "network", "unknown"]
"""The interconnect along a mesh axis; ``unknown`` where only the number of devices is known."""

Precision = Literal["default", "high", "highest"]
"""Precision of a float32 matmul, as in `jax.default_matmul_precision` or `precision=`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Floating-point operations per second of one device; a multiply and an add are two.

    Matmul rates are without sparsity. None: the matrix unit doesn't support the type and runs the next wider one.
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
    """Everything but matmuls, in float32."""

    def shared(self, parts: float) -> Rates:
        """The rates of each of several devices that share the same cores."""
        return Rates(**{name: rate and rate / parts for name, rate in dataclasses.asdict(self).items()})

    def matmul_flops_per_second(self, dtype: str, precision: Precision = "default") -> float:
        """The rate of a matmul whose operands have this dtype."""
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
    """Bandwidth and latency of one device over one kind of link."""

    bytes_per_second: float
    """Per link and direction; links are full duplex."""
    num_links: int = 1
    """Links of this kind per device: two per dim of a torus, the NVLink ports, ..."""
    latency_seconds: float
    """Per hop, for an empty message."""

    @property
    def total_bytes_per_second(self) -> float:
        """Over all links in one direction: a device's bandwidth into a switch."""
        return self.bytes_per_second * self.num_links

    def shared(self, parts: int) -> Wire:
        """The bandwidth of each of several devices that share the same links."""
        return dataclasses.replace(self, bytes_per_second=self.bytes_per_second / parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCollective:
    """Measured time of a collective: `start_seconds` + bytes on the wire / `bytes_per_second`."""

    kind: str
    """A `sharding.cost.Kind`: all-gather, all-reduce, ..."""
    link: Link
    """The interconnect of the devices."""
    num_devices: int
    """Per group."""
    start_seconds: float
    bytes_per_second: float
    """Of the bytes that each device sends by `sharding.cost.wire_bytes`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One kind of accelerator chip, with the vendor's numbers or measured ones."""

    name: str
    """The name in a description, lower case."""
    platform: Platform
    """JAX's name for the platform."""
    devices_per_chip: int = 1
    """JAX devices per chip."""
    memory_bytes: int | None
    """Memory of one device; None for host memory."""
    usable_memory_bytes: int | None = None
    """What a program may use of it: what libtpu offers, or what JAX allocates on GPUs by default; None: all of it."""
    memory_bytes_per_second: float
    """Reads and writes together."""
    rates: Rates
    matmul_share: float = 1.0
    """Of the matmul rates that the products of train steps reach; 1 where it was not measured."""
    memory_share: float = 1.0
    """Of the memory bandwidth that copies reach; 1 where it was not measured."""
    link: Link
    """The interconnect within one torus (TPU) or one host (GPU, CPU)."""
    wire: Wire
    """Its bandwidth and latency."""
    core_wire: Wire | None = None
    """Between the devices of one chip, where it has several."""
    network: Wire
    """Between hosts or TPU slices: one device's share."""
    host_wire: Wire
    """To the memory of the device's host."""
    host_memory_bytes: int | None = None
    """One device's share of the host's memory; None where it is unknown, or where device and host have one memory."""
    torus_dims: int = 0
    """Dims of the torus that the chips form; 0 where the shape is hosts x devices."""
    wraps_at: int = 0
    """A torus dim is a closed ring where its size is a multiple of this."""
    wraps_together: bool = False
    """Whether rings are closed only if all dims of the slice can be."""
    op_seconds: float
    """Fixed overhead per op: a kernel launch, or a step of XLA's runtime."""
    collective_seconds: float
    """Fixed overhead per collective."""
    shares_cores: bool = False
    """Whether the devices of a host are threads on the same cores. `rates` then assume one core per device; a
    calibration file has the rates per device while all run."""
    sends_while_computing: bool = True
    """Whether communication overlaps compute; never on CPU cores, calibrated or not."""
    gathers_while_computing: bool = False
    """Whether libtpu starts all-gathers that run while products do, as it does for some chips."""
    collectives: tuple[MeasuredCollective, ...] = ()
    """Measured collectives, which take precedence over the link model."""

    def on_cores(self, num_cores: int, num_devices: int) -> Chip:
        """The chip when this many devices share a host's cores; itself if its devices don't share cores."""
        parts = num_devices / num_cores
        if not self.shares_cores or parts <= 1:
            return self
        memory = self.memory_bytes_per_second / parts
        return dataclasses.replace(self, rates=self.rates.shared(parts), memory_bytes_per_second=memory)

    def without_overheads(self) -> Chip:
        """The chip at its rates alone: no fixed time per op, collective or message."""

        def at_once(wire: Wire) -> Wire:
            return dataclasses.replace(wire, latency_seconds=0.0)

        return dataclasses.replace(
            self,
            wire=at_once(self.wire),
            core_wire=self.core_wire and at_once(self.core_wire),
            network=at_once(self.network),
            host_wire=at_once(self.host_wire),
            op_seconds=0.0,
            collective_seconds=0.0,
            collectives=tuple(dataclasses.replace(c, start_seconds=0.0) for c in self.collectives),
        )
