"""Times of kernels and collectives by which XLA:GPU schedules, in microseconds.

XLA's estimator for an H100 (openxla/xla, `service/gpu/model/sol_latency_estimator.cc`) interpolates tables of measured
products and collectives, and divides the bytes of other kernels by the memory bandwidth. Collectives here fit what it
logs to 40 %; products count by their bytes, too. These are the compiler's figures, used to predict its schedule; for
step times see `op_time` and `collective_time`.
"""

from __future__ import annotations

from collections.abc import Mapping

BYTES_PER_US = 3.35e6
START_US = 1.0
"""Of the start or end of a collective on the device's stream."""
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
