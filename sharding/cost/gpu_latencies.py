"""Times of kernels and collectives by which XLA:GPU schedules, in microseconds.

XLA's estimator for an H100 (openxla/xla, `service/gpu/model/sol_latency_estimator.cc`) interpolates tables of measured
products and collectives, and divides the bytes of other kernels by the memory bandwidth. The functions here fit what it
logs: products to 25 %, collectives to 40 %. These are the compiler's figures, used to predict its schedule; for step
times see `op_time` and `collective_time`.
"""

from __future__ import annotations

from collections.abc import Mapping

BYTES_PER_US = 3.35e6
START_US = 1.0
"""Of the start or end of a collective on the device's stream."""
CONVOLUTION_US, LOOP_US = 10.0, 50.0
"""Any convolution; any loop or branch."""
PRODUCT_START_US = 5.5
HALF_FLOPS_PER_US, FLOAT_FLOPS_PER_US = 720e6, 400e6
COLLECTIVES: Mapping[str, tuple[float, float]] = {
    "all-gather": (12, 0.53e6),
    "all-reduce": (20, 0.40e6),
    "all-to-all": (20, 0.78e6),
    "collective-permute": (20, 0.45e6),
    "reduce-scatter": (20, 0.45e6),
}
"""Kind -> start in us, and bytes per us of operands and results together."""
SPLITS = tuple(2**k for k in range(12))
CORES = 132
TILE = 128


def collective_us(kind: str, num_bytes: int) -> float:
    """The latency of a collective by the bytes of its operands and results."""
    start, rate = COLLECTIVES[kind]
    return start + num_bytes / rate


def product_us(b: int, m: int, n: int, k: int, lhs: int, rhs: int, result: int) -> float:
    """The time of a matrix product, which XLA splits along its contracted dims where that fills the device better.

    Args:
        b, m, n, k: batch, rows, columns and contracted elements.
        lhs, rhs, result: bytes per element.
    """
    split = num_splits(b, m, n, k, lhs, rhs, result)
    if split > 1:  # partial sums in 32 bits
        b, k, result = b * split, -(-k // split), 4
    flops = 2 * b * m * n * k
    if max(lhs, rhs) == result and result in (2, 4):
        rate = HALF_FLOPS_PER_US if result == 2 else FLOAT_FLOPS_PER_US
        return flops * (1 / rate + PRODUCT_START_US / _table_flops(b, m, n, k))
    # Not in XLA's table: it looks up a product of as many bytes, whose FLOPs it counts in bytes, too.
    half = result / 2
    start = PRODUCT_START_US / _table_flops(b, m * half, n * half, k * half)
    return flops * result**3 * (1 / HALF_FLOPS_PER_US + start)


def num_splits(b: int, m: int, n: int, k: int, lhs: int, rhs: int, result: int) -> int:
    """Into how many XLA splits the contracted dims of a product (`splitk_rewriter.cc`), for an H100."""

    def cost(splits: int) -> float:
        tile = min(m, TILE) * min(n, TILE)
        tiles = b * splits * -(-m // TILE) * -(-n // TILE)
        waves = max(1.0, tiles * tile / (CORES * TILE * TILE))
        compute = 200.0 * tile * -(-k // splits) * waves
        partial = m * n * b * splits * (4 if splits > 1 else result)
        moved = (b * k * (m * lhs + n * rhs) + partial) * 0.194136
        reduction = 4.36e7 + (partial + b * m * n * result) * 193.1384 if splits > 1 else 0.0
        return max(compute, moved) + reduction

    return min(SPLITS, key=cost)


def _table_flops(b: float, m: float, n: float, k: float) -> float:
    """The FLOPs of the product in XLA's table that has the nearest sizes."""
    m, n, k = (min(max(size, 256), 4096) for size in (m, n, k))
    return 2 * min(b, 4) * m * n * k
