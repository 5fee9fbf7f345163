"""Times of kernels and collectives by which XLA:GPU schedules, in microseconds.

XLA's estimator for an H100 (openxla/xla, `service/gpu/model/sol_latency_estimator.cc`) interpolates tables of measured
products and collectives, and divides the bytes of other kernels by the memory bandwidth. Collectives here fit what it
logs to 40 %, and so do products. These are the compiler's figures, used to predict its schedule; for step times see
`op_time` and `collective_time`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

MOST_COMBINED_BYTES = 31_457_287
"""Of the results of collectives that run as one."""
BYTES_PER_US = 3.35e6
START_US = 1.0
"""Of the start or end of a collective on the device's stream."""
PRODUCTS: Mapping[tuple[int, int], tuple[float, float]] = {(4, 4): (12, 450e6), (2, 2): (5.5, 950e6)}
"""Bytes per element of operands and result -> start in us, and FLOPs per us. XLA has measured no others."""
UNMEASURED_FLOPS_PER_US = 9e6
TILE, NUM_TILES, LEAST_SUMMED = (64, 128), 256, 128
"""Tiles of a result, and how many keep a GPU busy: products with fewer are sums of several, each in float32."""
CONVOLUTION_US, LOOP_US = 10.0, 50.0
"""Any convolution; any loop or branch."""
COLLECTIVES: Mapping[str, tuple[float, float]] = {
    "all-gather": (12, 0.53e6),
    "all-reduce": (20, 0.40e6),
    "all-to-all": (20, 0.78e6),
    "collective-permute": (20, 0.45e6),
    "reduce-scatter": (20, 0.45e6),
}
"""Kind -> start in us, and bytes per us of operands and results together."""


def collective_us(kind: str, num_bytes: int) -> float:
    """The latency of a collective by the bytes of its operands and results."""
    start, rate = COLLECTIVES[kind]
    return start + num_bytes / rate


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

    @property
    def is_split(self) -> bool:
        """Whether XLA:GPU sums partial products of it (openxla/xla, `service/gpu/transforms/splitk_rewriter.cc`)."""
        tiles = self.batch * math.ceil(self.rows / TILE[0]) * math.ceil(self.columns / TILE[1])
        return 2 * tiles <= NUM_TILES and self.summed >= LEAST_SUMMED


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
