"""Times of kernels and collectives by which XLA:GPU schedules, in microseconds.

XLA's estimator for an H100 (openxla/xla, `service/gpu/model/sol_latency_estimator.cc`) interpolates tables of measured
products and collectives, and divides the bytes of other kernels by the memory bandwidth. Collectives here are what it
logs (`tests/benchmarks/collective_latencies.py`), products fit that to 40 %. These are the compiler's figures, used to
predict its schedule; for step times see `op_time` and `collective_time`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..spec import Axis, axis_size, num_parts

MOST_COMBINED_BYTES = 31_457_287
"""Of the results of collectives that run as one."""
BYTES_PER_US = 3.35e6
START_US = 1.0
"""Of the start or end of a collective on the device's stream."""
PRODUCTS: Mapping[tuple[int, int], tuple[float, float]] = {(4, 4): (12, 450e6), (2, 2): (5.5, 950e6)}
"""Bytes per element of operands and result -> start in us, and FLOPs per us. XLA has measured no others."""
UNMEASURED_FLOPS_PER_US = 9e6
TILE, NUM_TILES = (64, 128), 198
"""Tiles of a result, and how many keep a GPU busy: products with fewer are sums of several, each in float32."""
LEAST_SUMMED, LEAST_SUMMED_IF_MEMORY_BOUND = 1024, 768
"""Elements that each of these sums at least."""
MEMORY_BOUND_FLOPS, MOST_SPLITS = 240, 128
"""Multiply-adds for each 256 bits that a product reads or writes, below which memory bounds it; most parts of one."""
LATE_BYTES = 2**20
"""Of a constant that is filled right before it is read."""
CONVOLUTION_US, LOOP_US = 10.0, 0.01
"""Any convolution; any loop or branch."""
COLLECTIVES_FILE = Path(__file__).with_name("gpu_collectives.json")
FIRST_LOG2_BYTES = 10
COLLECTIVES: Mapping[str, Mapping[int, Sequence[float]]] = {
    kind: {int(n): times for n, times in by_devices.items()}
    for kind, by_devices in json.loads(COLLECTIVES_FILE.read_text()).items()
}
"""Kind -> devices of a group within a host -> microseconds for 2 ** 10 bytes of operands, 2 ** 11, and so on."""
UNMEASURED_COLLECTIVE_US = 5000.0
"""Any collective over several hosts, or in groups of another size."""
HOST_DEVICES = 8
"""GPUs that one host has at most."""


def collective_us(kind: str, num_bytes: int, num_devices: int) -> float:
    """The latency of a collective: that of the measured size next to it, in proportion.

    Args:
        kind: such as `all-gather`.
        num_bytes: of its operands on one device.
        num_devices: of each group, 0 over several hosts.
    """
    times = COLLECTIVES[kind].get(num_devices)
    if times is None:
        return UNMEASURED_COLLECTIVE_US
    below = max(FIRST_LOG2_BYTES, num_bytes.bit_length() - 1)
    nearest = below + (2 * num_bytes >= 3 * 2**below)
    nearest = min(nearest, FIRST_LOG2_BYTES + len(times) - 1)
    return times[nearest - FIRST_LOG2_BYTES] * num_bytes / 2**nearest


def devices_in_host(axes: Iterable[Axis], sizes: Mapping[str, int]) -> int:
    """The devices of each group of a collective over some mesh axes, 0 if they span hosts."""
    names, axes = list(sizes), list(axes)
    for axis in axes:
        name, parts_before = (axis, 1) if isinstance(axis, str) else axis[:2]
        minor = num_parts(names[names.index(name) :], sizes) // parts_before  # devices from one end of the axis on
        if axis_size(axis, sizes) > 1 and minor > HOST_DEVICES:
            return 0
    return num_parts(axes, sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A matrix product: its sizes on one device, and bytes per element."""

    batch: int
    rows: int
    columns: int
    summed: int
    operand_itemsize: int
    itemsize: int
    """Of the result."""
    is_reshaped: bool = False
    """Whether an array has more dims than those of a matrix, or of a stack of them."""

    @property
    def num_dims(self) -> int:
        """Of a matrix, or of a stack of them."""
        return 2 + (self.batch > 1)

    @property
    def num_splits(self) -> int:
        """How many products of parts XLA:GPU sums (openxla/xla, `service/gpu/transforms/splitk_rewriter.cc`)."""
        flops = self.rows * self.columns * self.summed
        bits = 8 * (
            self.operand_itemsize * self.summed * (self.rows + self.columns) + self.itemsize * self.rows * self.columns
        )
        if 256 * flops // max(1, bits) < MEMORY_BOUND_FLOPS:
            return min(MOST_SPLITS, _power_of_two(self.summed // LEAST_SUMMED_IF_MEMORY_BOUND))
        tiles = self.batch * math.ceil(self.rows / TILE[0]) * math.ceil(self.columns / TILE[1])
        most = 1 << max(1, self.summed // LEAST_SUMMED).bit_length() - 1
        return _power_of_two(min(most, math.ceil(NUM_TILES / tiles)))

    @property
    def is_split(self) -> bool:
        """Whether it is such a sum."""
        return self.num_splits > 1

    @property
    def sum_us(self) -> float:
        """The time to sum the parts of a split product."""
        return self.batch * self.rows * self.columns * (4 * self.num_splits + self.itemsize) / BYTES_PER_US


def _power_of_two(n: int) -> int:
    """The least one that is no smaller."""
    return 1 << max(0, n - 1).bit_length()


def product_us(product: Product, num_bytes: int) -> float:
    """The time of a matrix product.

    Args:
        num_bytes: of its operands and its result.
    """
    flops = 2 * product.batch * product.rows * product.columns * product.summed
    kind = product.operand_itemsize, 4 if product.is_split else product.itemsize
    if kind not in PRODUCTS:
        return flops / UNMEASURED_FLOPS_PER_US
    start, rate = PRODUCTS[kind]
    return start + flops / rate + num_bytes / BYTES_PER_US
